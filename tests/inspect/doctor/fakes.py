"""Faulty machines: packages by their metadata, files of /proc and /dev, refused system calls."""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from jtrain.inspect.doctor.checks import ChildResult, Finding

# Packages that fit together, with the requirements that matter: those of JAX are copied from it.
HEALTHY = {
    "jtrain": "0.1.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "flax": "0.12.8",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.8",
    "numpy": "2.4.6",
    "ml_dtypes": "0.6.0",
    "xxhash": "3.8.0",
}
REQUIRES = {
    "jtrain": (
        "flax>=0.12.6",
        "jax<0.13,>=0.10",
        "numpy>=2.0",
        "orbax-checkpoint>=0.12",
        "xxhash>=3.5",
        "rich>=14; extra == 'dev'",
    ),
    "jax": (
        "jaxlib<=0.10.2,>=0.10.1",
        "ml_dtypes>=0.5.0",
        "numpy>=2.0",
        'libtpu==0.0.42.*; extra == "tpu"',
        'jaxlib<=0.10.2,>=0.10.2; extra == "cuda12"',
        'jax-cuda12-plugin<=0.10.2,>=0.10.2; extra == "cuda12"',
    ),
    "flax": ("jax>=0.9.0", "numpy>=1.23.2"),
}


def metadata_of(name: str, version: str) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    for requirement in REQUIRES.get(name, ()) if version == HEALTHY.get(name) else ():
        lines.append(f"Requires-Dist: {requirement}")
    lines += [f"Provides-Extra: {extra}" for extra in ("tpu", "cuda12") if name == "jax"]
    return "\n".join(lines) + "\n"


def install(folder: Path, **versions: str) -> Path:
    """Write the metadata of packages, as pip would: `install(folder, jax="0.10.2")`."""
    for name, version in versions.items():
        name = name.replace("__", "-")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(metadata_of(name, version))
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
        (info / "INSTALLER").write_text("pip\n")
    return folder


def healthy(folder: Path, *without: str, **versions: str) -> Path:
    """Write the metadata of a healthy environment, some of it changed or left out."""
    usual = {k.replace("-", "__"): v for k, v in HEALTHY.items() if k not in without}
    return install(folder, **{**usual, **versions})


def write_files(root: Path, files: dict[str, str]) -> Path:
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


# Numbers of system calls, by machine.
CALLS = {
    "x86_64": {"fsync": 74, "rename": 82},
    "aarch64": {"fsync": 82, "rename": 38},
}


def refuse_call(name: str, number: int) -> None:
    """Let the kernel refuse a system call in this process and its children, by seccomp.

    For `preexec_fn`; Linux has no way back.
    """
    call = CALLS[platform.machine()][name]
    load, equal, answer, allow = 0x20, 0x15, 0x00050000 | number, 0x7FFF0000
    program: Sequence[tuple[int, int, int, int]] = (
        (load, 0, 0, 0),
        (equal, 0, 1, call),
        (0x06, 0, 0, answer),
        (0x06, 0, 0, allow),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))

    class Filter(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    given = Filter(len(program), ctypes.cast(code, ctypes.c_void_p))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(given), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def the(findings: Iterable[Finding], name: str) -> Finding:
    """Return the finding of a name, and show what was found otherwise."""
    found = list(findings)
    assert name in [finding.name for finding in found], found
    return next(finding for finding in found if finding.name == name)


def names(findings: Iterable[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def result(code: int | None = 0, errors: str = "", **reports) -> ChildResult:
    return ChildResult(reports, code, errors, 1.0)
