"""Whether checkpoints will fit: found out before training, not after a thousand steps of it."""

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jtrain.checkpoint import layout
from jtrain.checkpoint.leaf_table import flatten
from jtrain.errors import CheckpointError

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def bytes_of(state: Any) -> int:
    """Bytes of all leaves together, once: about what one checkpoint takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in flatten(state).values())


def on_disk(state: Any) -> int:
    """Return the bytes that one checkpoint of `state` takes on a disk of 4 kB blocks, about.

    A checkpoint of 15 bytes takes 82 kB (14 files, their folders, the description of each leaf),
    one of 20 leaves 119 kB: what matters on a disk that is all but full.
    """
    return bytes_of(state) + 20 * 4096 + 2048 * len(flatten(state))


def check_writable(directory: Path, need_bytes: int) -> None:
    """Makes the directory, writes to it, and compares what is free with what is needed.

    Raises:
        CheckpointError: if it cannot be made or written, or the disk has less than `need_bytes`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise layout.unwritable_error(directory, error) from None
    if shutil.disk_usage(directory).free < need_bytes:
        raise CheckpointError(
            f"checkpoints need {size(need_bytes)} in {directory}, and its disk has "
            f"{free(directory)} free: make room, name another directory, or lower checkpoint.keep."
        )


def free(directory: Path) -> str:
    """What is free on the disk of a directory, or of the nearest one above that exists."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return size(shutil.disk_usage(there).free)


def size(count: int) -> str:
    """`1.2 GB` for a number of bytes."""
    power = min(int(math.log(max(count, 1), 1000)), len(_UNITS) - 1)
    return f"{count / 1000**power:.3g} {_UNITS[power]}"
