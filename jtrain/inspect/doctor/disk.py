"""Check of the directory of the runs: space, speed, and the operations that a run needs."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor.child import ChildResult
from jtrain.inspect.doctor.finding import Finding, error, ok, warning
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import format_bytes, format_seconds

LEAST, LITTLE = 100_000_000, 2_000_000_000  # bytes free
FILES = 1000  # a checkpoint has 14 files and more
SLOW, FLUSH = 20_000_000, 0.5  # bytes a second, and seconds of an fsync
OPERATIONS = {
    "create": ("disk-create", "cannot be written"),
    "touch": ("disk-create", "cannot be written"),
    "write": ("disk-write", "cannot take and flush a file"),
    "rename": ("disk-rename", "cannot replace a file by another"),
}
IN_MEMORY = {"tmpfs", "ramfs"}
ELSEWHERE = "jtrain doctor --directory"


def filesystem(directory: Path, mounts: str) -> str:
    """Return the type of the file system of a directory, from /proc/self/mountinfo."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        place = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), words[4])
        if directory.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, rest.split()[0]
    return kind


def check_disk(
    directory: Path, result: ChildResult, *, kind: str, needed: int = 0
) -> list[Finding]:
    """Return findings about the directory of the runs.

    Args:
        result: what `probe_disk` reported.
        kind: type of the file system.
        needed: bytes of two checkpoints of the run; 0 if they are not known.
    """
    found = result.reports
    if result.code is None:
        finding = error(
            "disk",
            "disk-hangs",
            f"{directory} did not answer within {result.seconds:.0f} s "
            f"({found.get('stage', 'start')}): its file server hangs",
            f"df -h {directory}; {ELSEWHERE} /another/disk",
        )
        return [finding]
    faults = [
        *_check_operations(directory, found),
        *_check_space(directory, found, needed),
        *_check_speed(directory, found),
        *_check_kind(directory, kind),
    ]
    return faults or [ok("disk", describe(directory, found, kind))]


def describe(directory: Path, found: dict[str, Any], kind: str) -> str:
    """Describe a healthy disk: its space and its speed."""
    write = found["write"]
    return (
        f"{directory} ({kind or 'file system'}): {format_bytes(found['space']['free'])} free, "
        f"writes {format_bytes(round(write['bytes'] / write['seconds']))}/s, fsync "
        f"{format_seconds(write['fsync_seconds'])}"
    )


def _check_operations(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    existing = Path(found.get("existing", directory))
    for operation, (name, words) in OPERATIONS.items():
        if trouble := found.get(f"{operation}_error"):
            number, text = trouble
            advice = disk_advice(OSError(number, text), existing).words
            where = f"{directory}: {existing} {words}" if existing != directory else ""
            yield error(
                "disk",
                name,
                f"{where or f'{directory} {words}'} ({text}). {advice}",
                f"ls -ld {existing}; {ELSEWHERE} /another/disk",
            )
            return


def _check_space(directory: Path, found: dict[str, Any], needed: int) -> Iterator[Finding]:
    space = found.get("space")
    if not space:
        return
    free = space["free"]
    remedy = f"du -xh --max-depth=2 {directory} | sort -h | tail; jtrain ckpt rm RUN STEP"
    if free < max(LEAST, needed):
        words = f", and two checkpoints of the run take {format_bytes(needed)}" if needed else ""
        yield error(
            "disk",
            "disk-full",
            f"{directory} has {format_bytes(free)} free{words}",
            remedy,
        )
    elif free < LITTLE:
        yield warning("disk", "disk-little", f"{directory} has {format_bytes(free)} free", remedy)
    if 0 <= space["files"] < FILES:
        yield error(
            "disk",
            "disk-files",
            f"{directory}: its file system can take {space['files']} more files, and a checkpoint "
            f"has 14 or more",
            f"df -i {directory}; find {directory} -xdev | cut -d/ -f1-4 | sort | uniq -c | sort -n",
        )


def _check_speed(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    write = found.get("write")
    if not write:
        return
    speed = write["bytes"] / max(write["seconds"], 1e-9)
    if speed < SLOW or write["fsync_seconds"] > FLUSH:
        yield warning(
            "disk",
            "disk-slow",
            f"{directory} writes {format_bytes(round(speed))}/s, and an fsync takes "
            f"{format_seconds(write['fsync_seconds'])}: a checkpoint of 1 GB takes "
            f"{format_seconds(1e9 / max(speed, 1))}",
            "raise checkpoint.every, or link runs to a faster disk: ln -s /fast/disk runs",
        )


def _check_kind(directory: Path, kind: str) -> Iterator[Finding]:
    if kind in IN_MEMORY:
        yield warning(
            "disk",
            "disk-in-memory",
            f"{directory} is on {kind}: it takes memory, and is gone after a restart",
            f"link runs to a disk: ln -s /a/disk runs, or {ELSEWHERE} /a/disk",
        )
    elif kind.startswith("fuse.") and re.search("gcs|s3|blob|rclone|goofys", kind):
        yield warning(
            "disk",
            "disk-is-object-store",
            f"{directory} is an object store ({kind}): a rename there is a copy, and no lock holds",
            "train on a local disk, and copy checkpoints: checkpoint.store=gs://BUCKET/runs",
        )


def mounts() -> str:
    """Return the mounts of this process; empty where the system does not say."""
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def checkpoint_bytes(directory: Path) -> int:
    """Return the bytes of the newest checkpoint of a run; 0 if it has none."""
    steps = [path for path in (directory / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        return 0
    newest = max(steps, key=lambda path: int(path.name))
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(newest)
        for name in names
    )
