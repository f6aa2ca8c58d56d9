"""A checkpoint that could not be written: why, what it takes, and what may be done about it."""

from collections.abc import Mapping
from pathlib import Path

from jtrain.checkpoint import disk_space, layout, storage
from jtrain.core.types import Leaf
from jtrain.errors import FAULT, CheckpointError
from jtrain.io.disk_errors import disk_advice


class SaveError(CheckpointError):
    """A checkpoint that was asked for could not be written; running again goes on once it can."""

    code = FAULT

    def __init__(self, what: str, again: str, *, room: bool):
        super().__init__(f"{what}, and run again{again}.")
        self.what = what
        """What could not be written, why, and what to do."""
        self.room = room
        """Whether it is room that is lacking, which deletions would make."""


class TakenError(CheckpointError):
    """Another process copies the same run to the same store since."""

    code = FAULT


def failed(directory: Path, step: int, arrays: Mapping[str, Leaf], error: Exception) -> SaveError:
    """The error that says so, of what the disk or Orbax raised."""
    todo = disk_advice(error, directory)
    takes = f"it takes {disk_space.size(disk_space.on_disk(arrays))}"
    # What is free says nothing of a permission.
    free = f", the disk has {disk_space.free(directory)} free" if todo.room else ""
    return SaveError(
        f"checkpoint {step} could not be written to {directory}: {takes}{free} "
        f"({storage.short(error)}). {todo.words}",
        f": {_goes_on(directory, step)}",
        room=todo.room,
    )


def unannounced(directory: Path, step: int, error: Exception) -> SaveError:
    """Return the error for a checkpoint that is sealed, where what follows a save failed."""
    place = getattr(error, "filename", None) or directory.parent
    return SaveError(
        f"checkpoint {step} is saved in {directory}, and {place} could not be written after it "
        f"({storage.short(error)}). {disk_advice(error, Path(place)).words}",
        f": it goes on from step {step}",
        room=disk_advice(error, directory).room,
    )


def unsealed(directory: Path, step: int) -> SaveError:
    """The error of a process that did its part of a checkpoint which another could not seal."""
    return SaveError(
        f"checkpoint {step} was not sealed in {directory}: process 0 could not, and says why. "
        f"Do what it says",
        "",
        room=False,
    )


def _goes_on(directory: Path, step: int) -> str:
    """Where the run goes on without the checkpoint of a step."""
    try:
        whole = layout.steps(directory)
    except CheckpointError:
        return f"what lies in {directory} cannot be read now"
    if not whole:
        gone = not directory.is_dir()  # with what lies in it, which is put back
        return "it goes on from the newest in it" if gone else "it goes on from the beginning"
    before = ", as it was saved before" if whole[-1] == step else ""
    return f"it goes on from step {whole[-1]}{before}"
