"""Unused GPUs and TPUs of the machine, and the advice about them."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from jtrain.io.environment import installed_version

# Chips by Google, vendor 0x1ae0: TPUs, not the network cards of its virtual machines.
# Source: jax/_src/hardware_utils.py of jax 0.12.
GOOGLE = "0x1ae0"
TPU_DEVICES = {
    "0x0027": "v3",
    "0x0056": "",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
    "0x0083": "tpu8i",
    "0x007c": "tpu8t",
}
# Google Kubernetes Engine sets these in a container with TPUs. If libtpu finds none, it writes a
# sentence into both.
TPU_VARIABLES = {"TPU_ACCELERATOR_TYPE": r"\w+-\d+", "TPU_WORKER_HOSTNAMES": r"[\w.,:-]+"}
# Windows' subsystem for Linux keeps NVIDIA's driver here.
WSL_DRIVER = "usr/lib/wsl/lib/libcuda.so.1"
# The first driver that runs CUDA 13: https://docs.jax.dev/en/latest/installation.html
CUDA_13_DRIVER = 580
PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}


def is_installed(package: str) -> bool:
    """Return whether a distribution is installed."""
    return bool(installed_version(package))


def unused_accelerators(
    platforms: Collection[str],
    chosen: str | None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    has_package: Callable[[str], bool] = is_installed,
) -> list[str]:
    """Return a line for each kind of accelerator that is present and unused.

    Reads a few files, for about a millisecond, and starts nothing.

    Args:
        chosen: the platforms that a person chose, by JAX_PLATFORMS for example; then no line.
    """
    if chosen or {"gpu", "tpu"} & set(platforms):
        return []
    present = {"gpu": (find_nvidia(root), _cuda(root)), "tpu": (_tpu(root, environ), "tpu")}
    return [
        _line(platform, found, extra, has_package)
        for platform, (found, extra) in present.items()
        if found
    ]


def has_tpu_chips(root: Path) -> bool:
    """Return whether a TPU is on the PCI bus."""
    return any(True for _ in _google_chips(root))


def install_extra(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    has_package: Callable[[str], bool] = is_installed,
) -> str:
    """Return the extra of jtrain for the accelerator of this machine; empty for the CPU.

    An installed plugin decides between CUDA 12 and 13, since it is upgraded with JAX; two of them
    would be loaded side by side. `JAX_PLATFORMS=cpu` chooses the CPU.
    """
    if environ.get("JAX_PLATFORMS") == "cpu":
        return ""
    if find_nvidia(root):
        installed = (p for p in PLUGINS["gpu"] if has_package(p))
        plugin = next(installed, "")
        return plugin.split("-")[1] if plugin else _cuda(root)
    return "tpu" if _tpu(root, environ) else ""


def _line(platform: str, found: str, extra: str, has_package: Callable[[str], bool]) -> str:
    prefix = f"This machine has {found}, and JAX computes on the CPU:"
    for package in PLUGINS[platform]:
        if has_package(package):
            name = "cuda" if platform == "gpu" else "tpu"
            return (
                f"{prefix} {package} is installed and did not start. See why: "
                f'JAX_PLATFORMS={name} python3 -c "import jax; jax.devices()"'
            )
    return f"{prefix} pip install 'jtrain[{extra}]'"


def find_nvidia(root: Path) -> str:
    """Return NVIDIA's GPUs in words, according to their driver; empty without a GPU."""
    count = len(_matching(root / "dev", r"nvidia\d+")) or len(
        _matching(root / "proc/driver/nvidia/gpus", r".+")
    )
    if count > 1:
        return f"{count} NVIDIA GPUs"
    if count or (root / "dev/nvidiactl").exists() or (root / WSL_DRIVER).exists():
        return "an NVIDIA GPU"
    return ""


def _cuda(root: Path) -> str:
    """Return the extra for the newest CUDA that the driver runs."""
    return "cuda13" if nvidia_driver(root) >= CUDA_13_DRIVER else "cuda12"


def nvidia_driver(root: Path) -> int:
    """Return the version of NVIDIA's driver; 0 if it is unknown."""
    text = _read(root / "proc/driver/nvidia/version")
    version = re.search(r"\b(\d{3,})\.\d+", text)
    return int(version[1]) if version else 0


def _tpu(root: Path, environ: Mapping[str, str]) -> str:
    """Return a TPU in words; empty without one."""
    for kind in _google_chips(root):
        return f"a TPU {kind}".strip()
    matches = (re.fullmatch(form, environ.get(name, "")) for name, form in TPU_VARIABLES.items())
    return "a TPU" if _matching(root / "dev", r"accel\d+") or any(matches) else ""


def _google_chips(root: Path) -> Iterator[str]:
    """Yield the kind of each TPU on the PCI bus."""
    bus = root / "sys/bus/pci/devices"
    for name in _matching(bus, r".+"):
        if _read(bus / name / "vendor") == GOOGLE:
            device = _read(bus / name / "device")
            if device in TPU_DEVICES:
                yield TPU_DEVICES[device]


def _matching(folder: Path, pattern: str) -> list[str]:
    """Return the sorted names in a folder that match; none if the folder cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if re.fullmatch(pattern, name))
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
