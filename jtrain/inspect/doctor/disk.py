"""Check of the directory of the runs: space, speed, and the operations that a run needs."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor.child import ChildResult, Reporter
from jtrain.inspect.doctor.finding import Finding, error, ok, warning
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import format_bytes, format_seconds

LEAST, LITTLE = 100_000_000, 2_000_000_000  # bytes free
SLOW, FLUSH = 20_000_000, 0.5  # bytes a second, and seconds of an fsync
CHUNK, MOST, SECONDS = 1 << 20, 1 << 25, 0.7  # bytes and seconds of the write that is timed
OPERATIONS = {
    "create": ("disk-create", "cannot be written"),
    "write": ("disk-write", "cannot take and flush a file"),
    "rename": ("disk-rename", "cannot replace a file by another"),
}
ELSEWHERE = "jtrain doctor --directory"


def main(given: dict[str, Any], file: int) -> None:
    """Report the free space, and how each operation that a run needs went; in a child process."""
    probe(Path(given["directory"]), Reporter(file, given["timeout"]))


def probe(directory: Path, report: Callable[..., None]) -> None:
    """Try a directory, or the nearest one above it that exists; leave nothing behind."""
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    report(existing=str(existing))
    _try(report, "space", lambda: {"free": shutil.disk_usage(existing).free})
    folder = _try(report, "create", lambda: tempfile.mkdtemp(prefix=".doctor-", dir=existing))
    if folder is not None:
        try:
            _try(report, "write", lambda: _write(Path(folder)))
            _try(report, "rename", lambda: _rename(Path(folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _try(report: Callable[..., None], name: str, operation: Callable[[], Any]) -> Any:
    """Report the result of an operation, or the number of its error."""
    report(stage=name)
    try:
        result = operation()
    except OSError as error:
        report(**{f"{name}_error": [error.errno, error.strerror or str(error)]})
        return None
    report(**{name: result})
    return result


def _write(folder: Path) -> dict[str, float]:
    """Write for a while, and flush to the disk."""
    block, count = os.urandom(CHUNK), 0
    with (folder / "data").open("wb", buffering=0) as file:
        begun = time.perf_counter()
        while count < MOST and time.perf_counter() - begun < SECONDS:
            count += file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
        file.write(b"1")
        begun = time.perf_counter()
        os.fsync(file.fileno())
        return {"bytes": count, "seconds": seconds, "fsync_seconds": time.perf_counter() - begun}


def _rename(folder: Path) -> bool:
    """Replace a file by another, as checkpoints and records are written."""
    (folder / "new").write_text("new")
    (folder / "new").replace(folder / "data")
    return True


def check_disk(directory: Path, result: ChildResult) -> list[Finding]:
    """Return findings about the directory of the runs, by what `main` reported."""
    found = result.reports
    if result.code is None:
        words = f"{directory} did not answer within {result.seconds:.0f} s "
        words += f"({found.get('stage', 'start')}): its file server hangs"
        remedy = f"df -h {directory}; {ELSEWHERE} /another/disk"
        return [error("disk", "disk-hangs", words, remedy)]
    faults = [
        *_check_operations(directory, found),
        *_check_space(directory, found),
        *_check_speed(directory, found),
    ]
    if faults:
        return faults
    write = found["write"]
    words = f"{directory}: {format_bytes(found['space']['free'])} free, writes "
    words += f"{format_bytes(round(write['bytes'] / write['seconds']))}/s, fsync "
    return [ok("disk", words + format_seconds(write["fsync_seconds"]))]


def _check_operations(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    existing = Path(found.get("existing", directory))
    for operation, (name, words) in OPERATIONS.items():
        if trouble := found.get(f"{operation}_error"):
            number, text = trouble
            advice = disk_advice(OSError(number, text), existing).words
            where = f"{directory}: {existing}" if existing != directory else f"{directory}"
            remedy = f"ls -ld {existing}; {ELSEWHERE} /another/disk"
            yield error("disk", name, f"{where} {words} ({text}). {advice}", remedy)
            return


def _check_space(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    if not found.get("space"):
        return
    words = f"{directory} has {format_bytes(found['space']['free'])} free"
    remedy = f"du -xh --max-depth=2 {directory} | sort -h | tail; jtrain ckpt rm RUN STEP"
    if found["space"]["free"] < LEAST:
        yield error("disk", "disk-full", words, remedy)
    elif found["space"]["free"] < LITTLE:
        yield warning("disk", "disk-little", words, remedy)


def _check_speed(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    if not (write := found.get("write")):
        return
    speed = write["bytes"] / max(write["seconds"], 1e-9)
    if speed < SLOW or write["fsync_seconds"] > FLUSH:
        words = f"{directory} writes {format_bytes(round(speed))}/s, and an fsync takes "
        words += f"{format_seconds(write['fsync_seconds'])}: a checkpoint of 1 GB takes "
        words += format_seconds(1e9 / max(speed, 1))
        remedy = "raise checkpoint.every, or link runs to a faster disk: ln -s /fast/disk runs"
        yield warning("disk", "disk-slow", words, remedy)
