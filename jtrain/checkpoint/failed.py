"""A checkpoint that could not be written: why, what it takes, and what may be done about it."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jtrain.checkpoint import folder, space, storage
from jtrain.errors import FAULT, CheckpointError
from jtrain.types import Leaf

_ROOM = "Make room or lower checkpoint.keep"


class _Cause(NamedTuple):
    """What the disk or a library may say, and what to do about it."""

    number: int
    said: tuple[str, ...]
    advice: str
    room: bool = True


_CAUSES = (
    _Cause(
        errno.EFBIG,
        ("File too large",),
        "Files may not grow so large here: raise the limit (ulimit -f)",
    ),
    _Cause(errno.EDQUOT, ("quota exceeded",), "The quota is used up: make room, or ask for more"),
    _Cause(
        errno.EIO,
        ("Input/output error",),
        "The device fails: look at it (dmesg), or take another",
        room=False,
    ),
    _Cause(errno.ENOSPC, ("No space left", "RESOURCE_EXHAUSTED"), _ROOM),  # said of others, too
)


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
    need, whole = space.size(space.on_disk(arrays)), folder.steps(directory)
    on = f"step {whole[-1]}" if whole else "the beginning"
    causes = [cause for cause in _CAUSES if _is(error, cause)]
    advice = causes[0].advice if causes else _ROOM
    return SaveError(
        f"checkpoint {step} could not be written to {directory}: it takes {need}, the disk has "
        f"{space.free(directory)} free ({storage.short(error)}). {advice}",
        f": it goes on from {on}",
        room=any(cause.room for cause in causes),
    )


def unsealed(directory: Path, step: int) -> SaveError:
    """The error of a process that did its part of a checkpoint which another could not seal."""
    return SaveError(
        f"checkpoint {step} was not sealed in {directory}: process 0 could not, and says why. "
        f"{_ROOM}",
        "",
        room=False,
    )


def _is(error: Exception, cause: _Cause) -> bool:
    number = getattr(error, "errno", None)
    return number == cause.number or any(words in str(error) for words in cause.said)
