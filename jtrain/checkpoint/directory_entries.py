"""Entries of a directory of checkpoints, by their names: steps, what was set aside, and strays."""

import os
import re
from pathlib import Path

from jtrain.checkpoint import seal
from jtrain.errors import CheckpointError

DAMAGED, FOREIGN = ".damaged", ".foreign"
_ASIDE = re.compile(rf"\d+(\{DAMAGED}|\{FOREIGN})(-\d+)?")
_PARTS = ("state", "about.json", seal.SEAL)
_PASSING = re.compile(r"\d+\.(saving|replaced|deleting)")


class OutsideError(CheckpointError):
    """The checkpoints of a run are a link to what lies elsewhere."""


def entries(directory: Path) -> list[str]:
    """Return the names in a directory; none where it is not there.

    Raises:
        CheckpointError: if it cannot be read; an OutsideError if it is a run's `checkpoints` and a
            link out of the run's directory.
    """
    if leads_outside(directory):
        raise OutsideError(
            f"{directory} is a link to {directory.resolve()}, out of the run's directory: nothing "
            f"there is read. If the checkpoints there are yours, name their own place; otherwise "
            f"remove the link: rm {directory}"
        )
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} was to be looked through for checkpoints, and cannot be read "
            f"({error.strerror}). Make it readable: chmod u+rwx {directory}"
        ) from None


def leads_outside(directory: Path) -> bool:
    """Return whether the checkpoints of a run are a link out of the run's directory."""
    if directory.name != "checkpoints" or not directory.is_symlink():
        return False
    return not directory.resolve().is_relative_to(directory.parent.resolve())


def is_step(name: str) -> bool:
    """Return whether a name is that of a step: a number, as it is written."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def asides(directory: Path) -> list[Path]:
    """Return the checkpoints that were set aside, renamed and not deleted."""
    return sorted(directory / name for name in entries(directory) if _ASIDE.fullmatch(name))


def strays(directory: Path) -> list[tuple[str, int]]:
    """Return the checkpoints under names that are none, `66.bak` say: each name and sealed step."""
    known = lambda name: is_step(name) or _ASIDE.fullmatch(name) or _PASSING.fullmatch(name)
    others = sorted(name for name in entries(directory) if not known(name))
    found = ((name, seal.step_of(directory / name)) for name in others)
    return [(name, step) for name, step in found if step is not None]


def holds_any(directory: Path) -> bool:
    """Return whether a checkpoint lies in a directory: whole, damaged, set aside or renamed.

    An emptied one counts where the directory is called as that of a run is: other folders may have
    numbers for names. Nothing is looked for where a link leads out of a run.
    """
    if leads_outside(directory):
        return False
    steps = [name for name in entries(directory) if is_step(name)]
    lies = lambda step: any(os.path.lexists(directory / step / part) for part in _PARTS)
    counts = directory.name == "checkpoints" or any(map(lies, steps))
    return bool(asides(directory) or strays(directory) or (steps and counts))
