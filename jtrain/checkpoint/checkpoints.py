"""The checkpoints of a run: saved beside training, found, restored into any layout."""

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain import trees
from jtrain.checkpoint import folder, keeping, leaves, space, storage
from jtrain.checkpoint.task import Task
from jtrain.errors import CheckpointError
from jtrain.types import Leaf, Tree


class Checkpoints:
    """The checkpoints in a directory: `keep` of the newest, and the best by a number.

    Making one costs nothing and changes nothing on the disk: a reader may look on while another
    process trains. Close it (or use `with`) before the program ends: a save that is still being
    written when the interpreter goes is lost.

    In a run of several processes each makes one, over the same shared directory, and each calls
    `save` with the same step.
    """

    def __init__(self, directory: Path, *, keep: int = 2, best: str = ""):
        """`keep` 0 keeps all; `best` is `loss`, `lowest loss` or `highest accuracy`, or empty."""
        self.directory = Path(directory).absolute()
        self._keep, self._goal = keep, keeping.Goal.parse(best)
        self._writer: storage.Writer | None = None
        self._opening = threading.Lock()
        self._preparing: Task | None = None
        self._saving: Task | None = None

    def save(
        self, step: int, state: Any, about: Mapping[str, Any], best_value: float | int | None = None
    ) -> None:
        """Returns when the arrays of `state` may be donated; they are written beside training.

        A save that is still being written is waited for first, so that there is one copy of the
        state at a time. A checkpoint of the same step is replaced. Every process calls this.

        Args:
            step: what the checkpoint is called.
            state: any pytree of arrays, typed keys among them.
            about: JSON that is kept inside: the config, versions, metrics.
            best_value: the number by which the best is kept, if there is one.

        Raises:
            CheckpointError: if this save or the last one could not be written, and why.
        """
        self.wait()
        arrays = leaves.flatten(state)
        _check_json(about)
        record = {
            "step": step,
            "leaves": trees.describe(state),
            "best": {
                "name": self._goal.name if self._goal else "",
                "value": best_value if best_value is None else float(best_value),
            },
            "about": dict(about),
        }
        # In a thread from its first moment: a Ctrl-C ends our waiting, never Orbax in its middle.
        copied = threading.Event()
        self._saving = Task(lambda: self._write(step, arrays, record, copied))
        self._saving.start()
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raises CheckpointError if a save has failed since the last call; never waits."""
        if self._saving is not None and self._saving.ended():
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved is on the disk, under its name.

        Raises:
            CheckpointError: if it could not be written, once.
        """
        if self._saving is None:
            return
        error = self._saving.wait()
        self._saving = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits, then ends the threads. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            if self._preparing is not None:
                self._preparing.wait()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return folder.steps(self.directory)

    def newest(self) -> int | None:
        """The last complete step, if there is one."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best number, if any has one; the earliest of equals."""
        if self._goal is None:
            return None
        values = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):  # damaged, or deleted since it was listed
                found = folder.record(self.directory, step)["best"]
                if found["name"] == self._goal.name and found["value"] is not None:
                    values[step] = found["value"]
        return keeping.best_of(values, self._goal)

    def about(self, step: int) -> dict[str, Any]:
        """What was said of the checkpoint when it was saved.

        Raises:
            CheckpointError: if it is not there.
        """
        return folder.record(self.directory, step)["about"]

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of a step, in the structure of `like` and laid out as its leaves say.

        Args:
            step: one of `steps()`.
            like: a pytree of arrays or of `jax.ShapeDtypeStruct`; a leaf without a sharding comes
                back as a numpy array. The devices and axes may be others than those of the save.

        Raises:
            CheckpointError: if the step is not there, is damaged, or is of another structure, shape
                or dtype, with a table of what differs. Nothing is read then.
        """
        self.wait()
        record = folder.record(self.directory, step)
        leaves.check_same(record["leaves"], like, f"checkpoint {step} in {self.directory}")
        folder.check_files(self.directory, step, record["files"])
        try:
            flat = storage.read(self.directory / str(step) / folder.STATE, leaves.flatten(like))
        except storage.UnreadableError as error:
            raise folder.damaged(self.directory, step, str(error)) from None
        return leaves.unflatten(like, flat)

    def check_room(self, state: Any) -> None:
        """Makes sure, before training, that the directory takes what is going to be saved.

        Raises:
            CheckpointError: if it cannot be written, or the disk is too full for the checkpoints
                that are kept and the one that is being written.
        """
        one = space.bytes_of(state)
        count = max(self._keep, 1) + 1 + (self._goal is not None)
        there = min(len(self.steps()), count - 1)
        space.check_writable(self.directory, one * (count - there))

    def prepare(self) -> None:
        """Begins to load Orbax, in the background, and removes what killed saves left.

        Only for the process that trains, best beside the first compilation. The first `save` does
        the same where this was not called, and takes a second longer.
        """
        self._preparing = Task(self._open)
        self._preparing.start()

    def _open(self) -> storage.Writer:
        with self._opening:
            if self._writer is None:
                if jax.process_index() == 0:
                    folder.clear_leftovers(self.directory)
                self._writer = storage.Writer()
            return self._writer

    def _write(
        self, step: int, arrays: Mapping[str, Leaf], record: Mapping[str, Any], copied: Any
    ) -> None:
        """The whole of a save, in a thread of its own."""
        begun = None
        try:
            writer = self._open()
            if jax.process_index() == 0:
                begun = folder.begin(self.directory, step)
            writer.start(folder.saving(self.directory, step) / folder.STATE, arrays)
            copied.set()
            writer.finish()
            try:
                if begun is not None:
                    folder.commit(begun, record)
                    self._delete_dispensable()
            finally:
                writer.meet(f"{step}")
        except (OSError, ValueError, RuntimeError) as error:  # what the disk and Orbax raise
            if begun is not None:
                folder.abandon(begun)
            raise CheckpointError(self._failure(step, arrays, error)) from None
        finally:
            copied.set()

    def _delete_dispensable(self) -> None:
        for step in keeping.dispensable(self.steps(), self._keep, self.best()):
            folder.delete(self.directory, step)

    def _failure(self, step: int, arrays: Mapping[str, Leaf], error: Exception) -> str:
        need, whole = space.size(space.bytes_of(arrays)), self.steps()
        return (
            f"checkpoint {step} could not be written to {self.directory}: it takes {need}, the "
            f"disk has {space.free(self.directory)} free ({storage.short(error)}). "
            f"Make room or lower checkpoint.keep, and run again: it goes on from "
            f"{f'step {whole[-1]}' if whole else 'the beginning'}."
        )


def _check_json(about: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(about))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what is said about a checkpoint is kept as JSON, and this is not: {error}. "
            f"Give text, numbers, lists and dicts; float(x) makes a number of an array."
        ) from None
