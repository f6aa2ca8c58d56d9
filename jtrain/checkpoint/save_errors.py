"""Save errors: why a checkpoint could not be written, its size, and what to do."""

from collections.abc import Mapping
from pathlib import Path

from jtrain.checkpoint import disk_space, layout, storage
from jtrain.core.types import Leaf
from jtrain.errors import FAULT, CheckpointError, UnreachableError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import format_bytes


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
    size = f"it takes {format_bytes(disk_space.disk_bytes(arrays))}"
    # The free space is irrelevant to a missing permission.
    free = f", the disk has {disk_space.describe_free_space(directory)} free" if advice.room else ""
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
