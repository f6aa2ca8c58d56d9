"""Space for checkpoints, checked before training, and the errors of a save."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.checkpoint import layout, storage
from jtrain.checkpoint.leaf_table import flatten
from jtrain.core.types import Leaf
from jtrain.errors import FAULT, CheckpointError, UnreachableError
from jtrain.io.disk_errors import disk_advice
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


class SaveError(CheckpointError):
    """A requested checkpoint could not be written; running again resumes once it can."""

    code = FAULT

    def __init__(self, what: str, again: str, *, room: bool):
        super().__init__(f"{what}, and run again{again}.")
        self.what = what
        """Description of the failure, with its cause and advice."""
        self.room = room
        """True if the disk or the quota is full, so that deletions help."""


class TakenError(CheckpointError):
    """Another process has taken over the copies of the run in the store."""

    code = FAULT


def write_error(
    directory: Path, step: int, arrays: Mapping[str, Leaf], error: Exception
) -> SaveError:
    """Return the error for a save that the disk or Orbax failed."""
    advice = disk_advice(error, directory)
    size = f"it takes {format_bytes(disk_bytes(arrays))}"
    # The free space is irrelevant to a missing permission.
    free = f", the disk has {describe_free_space(directory)} free" if advice.room else ""
    return SaveError(
        f"checkpoint {step} could not be written to {directory}: {size}{free} "
        f"({storage.shorten_error(error)}). {advice.words}",
        f": {_resume_point(directory, step)}",
        room=advice.room,
    )


def announce_error(directory: Path, step: int, error: Exception) -> SaveError:
    """Return the error for a sealed checkpoint whose announcement failed."""
    path = getattr(error, "filename", None) or directory.parent
    return SaveError(
        f"checkpoint {step} is saved in {directory}, and {path} could not be written after it "
        f"({storage.shorten_error(error)}). {disk_advice(error, Path(path)).words}",
        f": it resumes from step {step}",
        room=disk_advice(error, directory).room,
    )


def unsealed_error(directory: Path, step: int) -> SaveError:
    """Return the error of a process whose checkpoint another process could not seal."""
    return SaveError(
        f"checkpoint {step} was not sealed in {directory}: process 0 failed, and its error has the "
        f"reason. Follow its advice",
        "",
        room=False,
    )


def _resume_point(directory: Path, step: int) -> str:
    """Describe where the run resumes without the checkpoint of a step."""
    try:
        complete = layout.list_steps(directory)
    except (CheckpointError, UnreachableError):
        return f"the checkpoints in {directory} cannot be read now"
    if not complete:
        if directory.is_dir():
            return "it restarts from the beginning"
        return "it resumes from the newest in it"  # the advice is to put the directory back
    before = ", as it was saved before" if complete[-1] == step else ""
    return f"it resumes from step {complete[-1]}{before}"
