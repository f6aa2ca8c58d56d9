"""Pinned checkpoint: a private copy that retention of the training process cannot remove.

The copy is made of hard links where the file system has them, so that it costs no space.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jtrain.checkpoint import layout
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice

# Errors of file systems that have no links, or none between these two folders.
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS}


class RemovedError(CheckpointError):
    """Checkpoint that was removed while it was read."""


def pin(checkpoints: Path, step: int, directory: Path, owner: RunIdentity | None) -> None:
    """Pin a checkpoint of a run in `directory`.

    Raises:
        RemovedError: if it was removed before all its files were pinned.
        CheckpointError: if the disk refuses the copy; a DamagedError if the files are not those of
            the seal.
    """
    path = directory / str(step)
    layout.try_remove(path)  # of a process that was killed
    try:
        _copy(checkpoints, step, directory, owner)
    except BaseException:
        layout.try_remove(path)
        raise


def _copy(checkpoints: Path, step: int, directory: Path, owner: RunIdentity | None) -> None:
    path = directory / str(step)
    try:
        shutil.copytree(checkpoints / str(step), path, symlinks=True, copy_function=_link)
    except (OSError, shutil.Error) as error:
        raise_removed(checkpoints, step)
        words = disk_advice(error, directory).words if isinstance(error, OSError) else "Look at it"
        raise CheckpointError(
            f"checkpoint {step} of {checkpoints} cannot be linked to {path} ({error}). {words}."
        ) from None
    faults = layout.find_faults(directory, step, full=False, owner=owner)
    if faults:
        raise_removed(checkpoints, step)
        raise layout.damaged_error(checkpoints, step, layout.summarize(faults), owner)


def unpin_all(directory: Path) -> Iterator[Path]:
    """Remove the copies that a killed process left; yield the path of each."""
    for step in layout.list_named_steps(directory):
        layout.try_remove(directory / str(step))
        yield directory / str(step)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def raise_removed(checkpoints: Path, step: int) -> None:
    """Raise RemovedError if a checkpoint that could not be read is no longer there."""
    if step not in layout.list_named_steps(checkpoints):
        raise RemovedError(
            f"checkpoint {step} in {checkpoints} was removed before it could be read: a larger "
            f"checkpoint.keep leaves more time"
        ) from None
