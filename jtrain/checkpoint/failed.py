"""A checkpoint that could not be written: why, what it takes, and what may be done about it."""

import errno
from collections.abc import Mapping
from pathlib import Path

from jtrain.checkpoint import folder, space, storage
from jtrain.errors import FAULT, CheckpointError
from jtrain.types import Leaf

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAID = ("RESOURCE_EXHAUSTED", "No space left", "quota exceeded", "File too large")


# What else than room may be lacking: by error number and by words of the libraries, what to do.
_ADVICE = {
    (
        errno.EFBIG,
        "File too large",
    ): "Files may not grow so large here: raise the limit (ulimit -f)",
    (errno.EDQUOT, "quota exceeded"): "The quota is used up: make room, or ask for more",
    (errno.EIO, "Input/output error"): "The device fails: look at it (dmesg), or take another",
}
_ROOM = "Make room or lower checkpoint.keep"


class SaveError(CheckpointError):
    """A checkpoint that was asked for could not be written; running again goes on once it can."""

    code = FAULT

    def __init__(self, what: str, again: str, *, room: bool):
        super().__init__(f"{what}, and run again{again}.")
        self.what = what
        """What could not be written, why, and what to do."""
        self.room = room
        """Whether it is room that is lacking, which deletions would make."""


def failed(directory: Path, step: int, arrays: Mapping[str, Leaf], error: Exception) -> SaveError:
    """The error that says so, of what the disk or Orbax raised."""
    need, whole = space.size(space.bytes_of(arrays)), folder.steps(directory)
    on = f"step {whole[-1]}" if whole else "the beginning"
    number, text = getattr(error, "errno", 0), str(error)
    advice = (advice for (n, said), advice in _ADVICE.items() if number == n or said in text)
    return SaveError(
        f"checkpoint {step} could not be written to {directory}: it takes {need}, the disk has "
        f"{space.free(directory)} free ({storage.short(error)}). {next(advice, _ROOM)}",
        f": it goes on from {on}",
        room=number in _NO_ROOM or any(each in text for each in _SAID),
    )


def unsealed(directory: Path, step: int) -> SaveError:
    """The error of a process that did its part of a checkpoint which another could not seal."""
    return SaveError(
        f"checkpoint {step} was not sealed in {directory}: process 0 could not, and says why. "
        f"{_ROOM}",
        "",
        room=False,
    )
