"""Directory entries of checkpoints, by their names: steps and set-aside checkpoints."""

import os
import re
from pathlib import Path

from jtrain.checkpoint import seal
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import patiently

DAMAGED, FOREIGN = ".damaged", ".foreign"
_ASIDE = re.compile(rf"\d+(\{DAMAGED}|\{FOREIGN})(-\d+)?")
_PARTS = ("state", "about.json", seal.SEAL)


class OutsideError(CheckpointError):
    """A `checkpoints` entry of a run that links out of its directory."""


@patiently
def list_entries(directory: Path) -> list[str]:
    """Return the names in a directory; none if it does not exist.

    Raises:
        OutsideError: if it is the `checkpoints` of a run and a link out of the run's directory.
        UnreachableError: if it cannot be read.
    """
    if links_outside(directory):
        raise OutsideError(
            f"{directory} links to {directory.resolve()}, out of the run's directory: it is not "
            f"followed. If those checkpoints are yours, name their real path; otherwise remove "
            f"the link: rm {directory}"
        )
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def links_outside(directory: Path) -> bool:
    """Return whether the `checkpoints` of a run is a link out of the run's directory."""
    if directory.name != "checkpoints" or not directory.is_symlink():
        return False
    return not directory.resolve().is_relative_to(directory.parent.resolve())


def is_step(name: str) -> bool:
    """Return whether a name is the decimal number of a step."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def list_set_aside(directory: Path) -> list[Path]:
    """Return the checkpoints that were set aside: renamed, not deleted."""
    return sorted(directory / name for name in list_entries(directory) if _ASIDE.fullmatch(name))


def has_checkpoint(directory: Path) -> bool:
    """Return whether a directory has a checkpoint: valid, damaged or set aside.

    An empty step folder counts only in a directory named `checkpoints`: other folders may have
    numbers for names. A link out of a run is not searched.
    """
    if links_outside(directory):
        return False
    steps = [name for name in list_entries(directory) if is_step(name)]
    nonempty = any(os.path.lexists(directory / step / part) for step in steps for part in _PARTS)
    has_steps = steps and (directory.name == "checkpoints" or nonempty)
    return bool(list_set_aside(directory) or has_steps)
