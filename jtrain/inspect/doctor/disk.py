"""Check of the directory of the runs: space, speed, and whether it can be written."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor.checks import ChildResult, Finding, error, ok, report, warning
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import format_bytes, format_seconds

LEAST, LITTLE = 100_000_000, 2_000_000_000  # bytes free
SLOW, FLUSH = 20_000_000, 0.5  # bytes a second, and seconds of an fsync
CHUNK, MOST, SECONDS = 1 << 20, 1 << 25, 0.7  # bytes and seconds of the write that is timed
ELSEWHERE = "jtrain doctor --directory /another/disk"


def main(given: dict[str, Any]) -> None:
    """Report on the directory in a child process: a file server may hang."""
    probe(Path(given["directory"]), report)


def probe(directory: Path, report: Callable[..., None]) -> None:
    """Try a directory, or the nearest one above it that exists; leave nothing behind."""
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    report(existing=str(existing))
    try:
        report(space={"free": shutil.disk_usage(existing).free})
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=existing))
        try:
            report(write=_write(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        report(error=[error.errno, error.strerror or str(error)])


def _write(folder: Path) -> dict[str, float]:
    """Write for a while, flush to the disk, and replace a file as checkpoints are written."""
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
        flush = time.perf_counter() - begun
    (folder / "new").write_text("new")
    (folder / "new").replace(folder / "data")
    return {"bytes": count, "seconds": seconds, "fsync_seconds": flush}


def check_disk(directory: Path, result: ChildResult) -> list[Finding]:
    """Return findings about the directory of the runs, by what `main` reported."""
    found = result.reports
    if result.code is None:
        words = f"{directory} did not answer within {result.seconds:.0f} s: its file server hangs"
        return [error("disk", "disk-hangs", words, f"df -h {directory}; {ELSEWHERE}")]
    if faults := list(_check_reports(directory, found)):
        return faults
    write = found["write"]
    words = f"{directory}: {format_bytes(found['space']['free'])} free, writes "
    words += f"{format_bytes(round(write['bytes'] / write['seconds']))}/s, fsync "
    return [ok("disk", words + format_seconds(write["fsync_seconds"]))]


def _check_reports(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    if trouble := found.get("error"):
        existing, (number, text) = Path(found["existing"]), trouble
        where = f"{directory}: {existing}" if existing != directory else f"{directory}"
        words = f"{where} cannot be written ({text}). "
        words += disk_advice(OSError(number, text), existing).words
        yield error("disk", "disk-write", words, f"ls -ld {existing}; {ELSEWHERE}")
    if space := found.get("space"):
        words = f"{directory} has {format_bytes(space['free'])} free"
        remedy = f"du -xh --max-depth=2 {directory} | sort -h | tail; jtrain ckpt rm RUN STEP"
        if space["free"] < LEAST:
            yield error("disk", "disk-full", words, remedy)
        elif space["free"] < LITTLE:
            yield warning("disk", "disk-little", words, remedy)
    if write := found.get("write"):
        speed = write["bytes"] / max(write["seconds"], 1e-9)
        if speed < SLOW or write["fsync_seconds"] > FLUSH:
            words = f"{directory} writes {format_bytes(round(speed))}/s, and an fsync takes "
            words += f"{format_seconds(write['fsync_seconds'])}: a checkpoint of 1 GB takes "
            words += format_seconds(1e9 / max(speed, 1))
            remedy = "raise checkpoint.every, or link runs to a faster disk: ln -s /fast/disk runs"
            yield warning("disk", "disk-slow", words, remedy)
