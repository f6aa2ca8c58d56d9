"""Check of JAX's devices: which it has, and why a GPU or a TPU is not among them."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.distributed.accelerators import (
    CUDA_13_DRIVER,
    find_nvidia,
    nvidia_driver,
    unused_accelerators,
)
from jtrain.distributed.cpu_threads import count_cpu_devices, describe_small_pool
from jtrain.inspect.doctor.checks import ChildResult, Finding, error, ok, report, warning
from jtrain.inspect.doctor.packages import PLUGIN, PackageFacts

CUDA_12_DRIVER = 525  # https://docs.jax.dev/en/latest/installation.html
LIBTPU_LOCK = "/tmp/libtpu_lockfile"
CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cudnn|cusparse|cusolver|cufft|nccl)\w*\.so.*")
# Messages of JAX about a backend that was not asked for and is not installed.
_NOT_INSTALLED = re.compile("'tpu'.*Failed to open libtpu.so|not installed")
PYTHON = Path(sys.executable).name
CPU = "export JAX_PLATFORMS=cpu"


def main(given: dict[str, Any]) -> None:
    """Start JAX and its devices in a child process, and report each."""
    del given
    messages = _collect_messages()
    begun = time.perf_counter()
    import jax

    report(jax=jax.__version__, import_seconds=time.perf_counter() - begun)
    begun = time.perf_counter()
    try:
        devices = jax.devices()
    finally:
        report(messages=messages)
    report(
        devices=[{"platform": d.platform, "id": d.id, "kind": d.device_kind} for d in devices],
        device_seconds=time.perf_counter() - begun,
        chosen=jax.config.jax_platforms or "",  # pyright: ignore[reportAttributeAccessIssue]
        pool=describe_small_pool(count_cpu_devices(devices)),
    )


def _collect_messages() -> list[str]:
    """Return a list into which JAX's messages about backends go: why a plugin did not start."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f" {record.exc_info[1]}"
            messages.append(text)

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.setLevel(logging.INFO)
    logger.addHandler(Collector())
    return messages


def check_devices(
    packages: PackageFacts,
    environ: Mapping[str, str],
    result: ChildResult,
    root: Path = Path("/"),
) -> Iterator[Finding]:
    """Return findings about the devices."""
    plugins = [name for name in packages.first() if PLUGIN.fullmatch(name) or name == "libtpu"]
    unused = unused_accelerators(
        ["cpu"], None, root=root, environ=environ, has_package=plugins.__contains__
    )
    found, static = result.reports, [*_check_cuda(plugins, environ, root)]
    yield from static
    if "jax" not in found:
        yield _import_failed(result)
    elif "devices" not in found:
        yield _start_failed(plugins, unused, environ, result)
    else:
        yield from _check_unused(plugins, unused, found, explained=bool(static))
        yield _started(found)
        for line in found.get("pool", []):
            words, _, remedy = line.partition(". ")
            yield warning("devices", "device-threads", words, remedy)


def _check_unused(
    plugins: Sequence[str], unused: Sequence[str], found: Mapping[str, Any], explained: bool
) -> Iterator[Finding]:
    """Check for an accelerator that is idle while JAX computes on the CPU."""
    if found["chosen"] or {"gpu", "tpu"} & {each["platform"] for each in found["devices"]}:
        return
    reasons = [x for x in found.get("messages", []) if not _NOT_INSTALLED.search(x)]
    if plugins and not unused and not explained:
        words = f"{', '.join(plugins)} is installed and found no device: "
        words += f"{_shorten(reasons)}. JAX computes on the CPU"
        cuda = any("cuda" in name for name in plugins)
        remedy = f"nvidia-smi || {CPU}" if cuda else CPU
        yield warning("devices", "plugin-without-device", words, remedy)
    for line in unused:
        words, _, remedy = line.rpartition(": ")
        words = words.removesuffix(". See why")
        why = f": {_shorten(reasons)}" if plugins and reasons else ""
        yield warning("devices", "accelerator-unused", f"{words}{why}", remedy)


def _started(found: Mapping[str, Any]) -> Finding:
    kinds = [f"{each['kind']} ({each['platform']})" for each in found["devices"]]
    counts = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    words = f"{counts}, jax {found['jax']} (imported in {found['import_seconds']:.1f} s, "
    return ok("devices", f"{words}started in {found['device_seconds']:.1f} s)")


def _check_cuda(
    plugins: Sequence[str], environ: Mapping[str, str], root: Path
) -> Iterator[Finding]:
    cuda = [name for name in plugins if "cuda" in name]
    folders = list(_cuda_folders(environ.get("LD_LIBRARY_PATH", "")))
    if cuda and folders:
        yield warning(
            "devices",
            "cuda-library-path",
            f"LD_LIBRARY_PATH has CUDA's libraries in {', '.join(folders)}, which are "
            f"loaded in place of those that {cuda[0]} was built for",
            "unset LD_LIBRARY_PATH",
        )
    hidden, nvidia = environ.get("CUDA_VISIBLE_DEVICES"), find_nvidia(root)
    if nvidia and hidden is not None and hidden.strip() in {"", "-1", "NoDevFiles"}:
        words = f"CUDA_VISIBLE_DEVICES={hidden!r} hides {nvidia}"
        yield warning("devices", "gpus-hidden", words, "unset CUDA_VISIBLE_DEVICES")
    driver = nvidia_driver(root)
    drivers = {"jax-cuda13-plugin": CUDA_13_DRIVER, "jax-cuda12-plugin": CUDA_12_DRIVER}
    for name, least in drivers.items():
        if name in cuda and 0 < driver < least:
            found = f"{name} needs NVIDIA's driver {least} or newer, and it is {driver}"
            remedy = "update the driver: https://www.nvidia.com/drivers"
            if driver >= CUDA_12_DRIVER:
                remedy = f"{PYTHON} -m pip uninstall -y {name}; "
                remedy += f"{PYTHON} -m pip install 'jtrain[cuda12]'"
            yield error("devices", "driver-old", found, remedy)


def _import_failed(result: ChildResult) -> Finding:
    last = _last_line(result.errors)
    if result.code is None:
        words = f"import jax {result.ending}"
        return error("devices", "jax-import", words, f"{PYTHON} -X importtime -c 'import jax'")
    if missing := re.search(r"No module named '(jax|jaxlib)'", last):
        words, remedy = f"{missing[1]} is not installed", f"{PYTHON} -m pip install jtrain"
        return error("devices", "jax-import", words, remedy)
    if result.code < 0 or "MemoryError" in last or "cannot allocate" in result.errors:
        words = f"import jax {result.ending}{f' ({last})' if last else ''}"
        return error("devices", "jax-import", words, "ulimit -a; free -m")
    remedy = f"{PYTHON} -m pip install --force-reinstall jax jaxlib"
    return error("devices", "jax-import", f"jax cannot be imported: {last}", remedy)


def _start_failed(
    plugins: Sequence[str], unused: Sequence[str], environ: Mapping[str, str], result: ChildResult
) -> Finding:
    """Return a finding about devices that did not start."""
    platforms = environ.get("JAX_PLATFORMS", "")
    reasons = [x for x in result.reports.get("messages", []) if not _NOT_INSTALLED.search(x)]
    why = _shorten(reasons) if reasons else _last_line(result.errors)
    if "libtpu multi-process lockfile" in result.errors + " ".join(reasons):
        found = f"another process holds {LIBTPU_LOCK}: one process at a time may use the TPU"
        return error("devices", "libtpu-locked", found, f"lsof {LIBTPU_LOCK}")
    if result.code is None:
        remedy = "export TPU_SKIP_MDS_QUERY=1" if "libtpu" in plugins else CPU
        return error("devices", "devices-hang", f"the start of the devices {result.ending}", remedy)
    if result.code < 0:
        words = f"the start of the devices {result.ending}: {why}"
        return error("devices", "devices-crash", words, CPU)
    if platforms and platforms != "cpu":
        if not reasons:
            why = f"no package for {platforms} is installed"
        # The last line of `unused` has the command that installs the package for this machine.
        remedy = unused[-1].rpartition(": ")[2] if unused else CPU
        words = f"JAX_PLATFORMS={platforms} asks for devices that JAX does not find: {why}"
        return error("devices", "platform-missing", words, remedy)
    return error("devices", "devices-fail", f"no device starts: {why}", CPU)


def _cuda_folders(path: str) -> Iterator[str]:
    for folder in filter(None, path.split(os.pathsep)):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        if any(CUDA_LIBRARY.fullmatch(name) for name in names):
            yield folder


def _shorten(reasons: list[str]) -> str:
    """Return the first reason on one line."""
    text = " ".join(reasons[0].split()) if reasons else "JAX does not say why"
    return text if len(text) <= 300 else text[:300] + " ..."


def _last_line(errors: str) -> str:
    """Return the last line that is not a trace."""
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith(" ")]
    return " ".join(lines[-1].split())[:300] if lines else "no message"
