"""Child process that tries the directory of the runs: a file server may hang."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor.child import Reporter

CHUNK, MOST, SECONDS = 1 << 20, 1 << 25, 0.7  # bytes and seconds of the write that is timed


def main(given: dict[str, Any], file: str) -> None:
    """Report the free space, and how each operation that a run needs went."""
    probe(Path(given["directory"]), Reporter(file, given["timeout"]))


def probe(directory: Path, report: Callable[..., None]) -> None:
    """Try a directory, or the nearest one above it that exists; leave nothing behind."""
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    report(stage="statvfs", existing=str(existing))
    _try(report, "space", lambda: _space(existing))
    report(stage="create")
    folder = _try(report, "create", lambda: tempfile.mkdtemp(prefix=".doctor-", dir=existing))
    if folder is None:
        return
    report(folder=folder)
    try:
        place = Path(folder)
        _try(report, "touch", (place / "touched").touch)
        for name, operation in (("write", _write), ("rename", _rename)):
            report(stage=name)
            _try(report, name, lambda operation=operation: operation(place))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(stage="end")


def _try(report: Callable[..., None], name: str, operation: Callable[[], Any]) -> Any:
    """Report the result of an operation, or the number of its error."""
    try:
        result = operation()
    except OSError as error:
        report(**{name: None, f"{name}_error": [error.errno, error.strerror or str(error)]})
        return None
    report(**{name: result})
    return result


def _space(directory: Path) -> dict[str, int]:
    found = os.statvfs(directory)
    return {
        "free": found.f_frsize * found.f_bavail,
        "total": found.f_frsize * found.f_blocks,
        "files": found.f_favail if found.f_files else -1,
    }


def _write(folder: Path) -> dict[str, float]:
    """Write for a while, and flush to the disk."""
    block, count = os.urandom(CHUNK), 0
    with (folder / "data").open("wb", buffering=0) as file:
        begun = time.perf_counter()
        while count < MOST and time.perf_counter() - begun < SECONDS:
            count += file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
        file.seek(0)
        file.write(b"1")
        begun = time.perf_counter()
        os.fsync(file.fileno())
        flush = time.perf_counter() - begun
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return {"bytes": count, "seconds": seconds, "fsync_seconds": flush}


def _rename(folder: Path) -> bool:
    """Replace a file by another, as checkpoints and records are written."""
    (folder / "old").write_text("old")
    (folder / "new").write_text("new")
    (folder / "new").replace(folder / "old")
    (folder / "step").mkdir()
    (folder / "step").rename(folder / "sealed")
    return (folder / "old").read_text() == "new"
