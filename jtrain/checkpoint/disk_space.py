"""Disk space: checked before training, not after a thousand steps."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jtrain.checkpoint import layout
from jtrain.checkpoint.leaf_table import flatten
from jtrain.errors import CheckpointError
from jtrain.io.formatting import format_bytes


def state_bytes(state: Any) -> int:
    """Return the bytes of all leaves, each counted once: about the size of one checkpoint."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in flatten(state).values())


def disk_bytes(state: Any) -> int:
    """Estimate the bytes of one checkpoint of `state` on a disk with blocks of 4 kB.

    A checkpoint of 15 bytes takes 82 kB (14 files, their folders, the description of each leaf),
    one of 20 leaves 119 kB; this matters on an almost full disk.
    """
    return state_bytes(state) + 20 * 4096 + 2048 * len(flatten(state))


def check_writable(directory: Path, need_bytes: int) -> None:
    """Create the directory, write to it, and compare the free space with `need_bytes`.

    Raises:
        CheckpointError: if the directory cannot be created or written, or the disk has less than
            `need_bytes` free.
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
            f"checkpoints need {format_bytes(need_bytes)} in {directory}, and its disk has "
            f"{describe_free_space(directory)} free: make room, use another directory, or "
            "lower checkpoint.keep."
        )


def describe_free_space(directory: Path) -> str:
    """Describe the free space of a directory or its nearest existing parent."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return format_bytes(shutil.disk_usage(existing).free)
