"""The checkpoints of a run: saved beside training, found, restored into any layout."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import (
    disk_space,
    exit_barrier,
    fingerprint,
    layout,
    leaf_table,
    retention,
    storage,
)
from jtrain.checkpoint.lock import NAME, Lock
from jtrain.checkpoint.newest_valid import damaged_error, newest_valid, replica_error
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.save_errors import SaveError, failed
from jtrain.checkpoint.thread_task import ThreadTask
from jtrain.checkpoint.writer import CheckpointWriter, spare
from jtrain.core import pytree
from jtrain.core.types import Leaf, Tree
from jtrain.distributed.multihost import all_gather
from jtrain.errors import CheckpointError, DamagedError
from jtrain.io.message_backlog import MessageBacklog


class SetAsideError(DamagedError):
    """A checkpoint that was to be gone on from is damaged, and was put away: ask for another."""


class CheckpointManager:
    """The checkpoints in a directory: `keep` of the newest, and the best by a number.

    Making one costs nothing and changes nothing on the disk: a reader may look on while another
    process trains. One process writes at a time: the first `prepare`, `resume` or `save` takes the
    directory, `close` gives it back. Where a program ends without `close` (or `with`), a save that
    is being written is waited for; if it fails, a line says so and the exit code is 70.

    In a run of several processes each makes one, over the same shared directory, and each calls
    `save` with the same step.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        best: str = "",
        first: bool | None = None,
        fall_back: bool = True,
        lost: Callable[[str], object] = lambda line: None,
        owner: RunIdentity | None = None,
    ):
        """`keep` 0 keeps all; `best` is `loss`, `lowest loss` or `highest accuracy`, or empty.

        `first` says whether this process is the first of a run; None asks JAX, which starts the
        devices. `fall_back` says whether a damaged checkpoint is set aside for the one before it.
        `lost` takes a line where others have removed a checkpoint, or the directory, meanwhile.
        `owner` is the run that they belong to: its id is sealed into each that is saved, and a
        checkpoint of another run counts as damaged. None takes those of any run.
        """
        self.directory = Path(directory).absolute()
        self._keep, self._goal, self._first = keep, retention.BestMetric.parse(best), first
        self._owner = owner
        self.tell = MessageBacklog()
        """Takes what is to be told of the directory while it is written."""
        self.news: list[str] = []
        """Lines about checkpoints that were set aside because they are damaged."""
        self._saver = CheckpointWriter(
            self.directory, self._dispensable, self.tell, run=owner.run if owner else ""
        )
        self._lock: Lock | None = None
        self._lost = lost
        self._there: set[int] = set()  # that this process sealed and did not delete
        self._fall_back = fall_back
        self._whole: set[int] = set()
        self._preparing: ThreadTask | None = None
        self._saving: ThreadTask | None = None

    def save(
        self,
        step: int,
        state: Any,
        about: Mapping[str, Any],
        best_value: float | int | None = None,
        sealed: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Returns when the arrays of `state` may be donated; they are written beside training.

        A save that is still being written is waited for first, so that there is one copy of the
        state at a time. A checkpoint of the same step is replaced. Every process calls this.

        Args:
            step: what the checkpoint is called.
            state: any pytree of arrays, typed keys among them.
            about: JSON that is kept inside: the config, versions, metrics.
            best_value: the number by which the best is kept, if there is one.
            sealed: is told the step when the checkpoint would outlive a power cut, in a thread.

        Raises:
            SaveError: if this save or the last one could not be written, and why.
            CheckpointError: if another process writes in the directory.
            DeviceError: if devices hold copies of a leaf that are not the same.
        """
        self.wait()
        self.take()
        arrays = leaf_table.flatten(state)
        _check_json(about)
        self._look_after(step, arrays)
        record = {
            "step": step,
            "leaves": pytree.describe(state),
            "fingerprints": {},
            "best": {
                "name": self._goal.name if self._goal else "",
                "value": best_value if best_value is None else float(best_value),
            },
            "about": dict(about),
        }
        # In a thread from its first moment: a Ctrl-C ends our waiting, never JAX or Orbax in their
        # middle; JAX makes a ValueError of one, or takes half a trace for a whole one.
        copied = threading.Event()
        self._whole.discard(step)
        write = self._saver.write

        def seals(step: int) -> None:
            self._there.add(step)
            sealed(step)

        # `ending` waits for it. Where it fails, threads of Orbax wait 10 minutes for one another.
        self._saving = ThreadTask(lambda: write(step, arrays, record, copied, seals), daemon=True)
        exit_barrier.expect_close(self)
        self._saving.start()
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raises SaveError if a save has failed since the last call; never waits."""
        if self._saving is not None and self._saving.ended():
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved is on the disk, under its name.

        Raises:
            SaveError: if it could not be written, once.
        """
        if self._saving is None:
            return
        error = self._saving.wait()
        self._saving = None
        if error is not None:
            self._remove_made_anew()
            raise error

    def close(self) -> None:
        """Waits, then ends the threads. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            exit_barrier.mark_closed(self)
            if self._preparing is not None:
                self._preparing.wait()
            self._saver.close()
            self._remove_made_anew()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return layout.steps(self.directory, self._owner)

    def newest(self) -> int | None:
        """The last complete step, if there is one; its bytes are not read."""
        return max(self.steps(), default=None)

    def is_whole(self, step: int) -> bool:
        """Whether a step is there and every byte of it, which is read, is what was sealed."""
        return not layout.find_faults(self.directory, step, full=True, owner=self._owner)

    def resume(self) -> int | None:
        """The last step of which every byte is what was sealed; for the process that trains.

        Damaged ones that are newer, and all of another run, are set aside, renamed and not deleted;
        `news` says so. In a run of several processes the first one reads, and all call this.

        Raises:
            DamagedError: if the newest is damaged, where it is not to be passed over, or a damaged
                one cannot be renamed.
        """
        self.take()
        step, news = newest_valid(self.directory, fall_back=self._fall_back, owner=self._owner)
        self._whole |= {step} if step is not None else set()
        self.news += news
        return step

    def remove(self, step: int) -> None:
        """Deletes a checkpoint that a run no longer goes on from; in the process that writes."""
        self.wait()
        self.take()
        self._there.discard(step)
        layout.delete(self.directory, step)

    def best(self) -> int | None:
        """The step with the best number, if any has one; the earliest of equals."""
        if self._goal is None:
            return None
        values = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):  # damaged, or deleted since it was listed
                found = layout.record(self.directory, step)["best"]
                if found.get("name") == self._goal.name and found.get("value") is not None:
                    values[step] = found["value"]
        return retention.best_of(values, self._goal)

    def about(self, step: int) -> dict[str, Any]:
        """What was said of the checkpoint when it was saved.

        Raises:
            CheckpointError: if it is not there.
        """
        return layout.record(self.directory, step)["about"]

    def restore(self, step: int, like: Tree, *, cast: bool = False) -> Tree:
        """The state of a step, in the structure of `like` and laid out as its leaves say.

        Args:
            step: one of `steps()`.
            like: a pytree of arrays or of `jax.ShapeDtypeStruct`; a leaf without a sharding comes
                back as a numpy array. The devices and axes may be others than those of the save.
            cast: whether leaves may come in another dtype than they were saved in.

        Raises:
            CheckpointError: if the step is not there, or is of another structure, shape or dtype,
                with a table of what differs; nothing is read then.
            DamagedError: if it is damaged, or a leaf is another than that which was saved, after it
                was read: a SetAsideError in a process that writes here.
            DeviceError: if only some processes of a run have read another leaf.
        """
        self.wait()
        record = layout.record(self.directory, step)
        where = f"checkpoint {step} in {self.directory}"
        stored = leaf_table.check_same(record["leaves"], like, where, cast=cast)
        if step not in self._whole:
            layout.check(self.directory, step, self._owner)
        try:
            flat = storage.read(self.directory / str(step) / layout.STATE, stored)
        except storage.UnreadableError as error:
            raise layout.damaged_error(self.directory, step, str(error), self._owner) from None
        self._check_leaves(step, record["fingerprints"], flat)
        return leaf_table.unflatten(like, leaf_table.cast_as(flat, like) if cast else flat)

    def check_room(self, state: Any) -> None:
        """Makes sure, before training, that the directory takes what is going to be saved.

        Raises:
            CheckpointError: if it cannot be written, or the disk is too full for the checkpoints
                that are kept and the one that is being written.
        """
        one = disk_space.on_disk(state)
        count = max(self._keep, 1) + 1 + (self._goal is not None)
        there = min(len(self.steps()), count - 1)
        disk_space.check_writable(self.directory, one * (count - there))

    def prepare(self) -> None:
        """Begins to load Orbax, in the background, and removes what killed saves left.

        Only for the process that trains, best beside the first compilation. The first `save` does
        the same where this was not called, and takes a second longer.

        Raises:
            CheckpointError: if another process writes in the directory, or it cannot be written.
        """
        self.take()
        self._preparing = ThreadTask(self._saver.open)
        self._preparing.start()

    def take(self) -> None:
        """Takes the directory, if it is not ours already: before anything costly is begun.

        Raises:
            CheckpointError: as `prepare`.
        """
        if self._lock is None and self._is_first():
            self._lock = Lock(self.directory)
            layout.restore_replaced(self.directory)  # before anybody asks what there is

    def tidy(self) -> None:
        """Removes what a process left that died at its very end, if no other writes there."""
        if self._is_first() and (self.directory / NAME).exists():
            with contextlib.suppress(CheckpointError):
                self.take()
                layout.clear_leftovers(self.directory, self.tell)
            self.close()

    def spare(self) -> list[int]:
        """The steps that are deleted to make room: all but the newest and the best."""
        gone = spare(self.directory, self.best()) if self._is_first() else []
        self._there -= set(gone)
        return gone

    def _look_after(self, step: int, arrays: Mapping[str, Leaf]) -> None:
        """Says what others have removed since the last save, and holds the directory again."""
        if self._lock is None:  # of several processes the first does
            return
        try:
            missing = self._lock.renew()
        except OSError as error:
            raise failed(self.directory, step, arrays, error) from None
        except CheckpointError as error:  # another has come, now that the directory is a new one
            what = f"checkpoint {step} could not be written: {str(error).rstrip('.')}"
            raise SaveError(what, "", room=False) from None
        if missing:
            self._lost(missing)
            if not self.steps():
                self._there.clear()  # they went with their directory
        gone = self._there - set(self.steps())
        self._there -= gone
        for each in sorted(gone):
            self._lost(f"checkpoint {each} was removed or damaged after it was sealed")

    def _remove_made_anew(self) -> None:
        """Removes empty folders under the names of ours, where those were moved in a save.

        Orbax and TensorStore make the folders above each file that they write.
        """
        if self._lock is not None and not self._lock.is_above_there:
            for path in (self.directory, self.directory.parent):
                with contextlib.suppress(OSError):
                    path.rmdir()

    def _is_first(self) -> bool:
        return jax.process_index() == 0 if self._first is None else self._first

    def _dispensable(self) -> list[int]:
        gone = retention.dispensable(self.steps(), self._keep, self.best())
        self._there -= set(gone)
        return gone

    def _check_leaves(self, step: int, saved: Mapping[str, str], flat: Mapping[str, Leaf]) -> None:
        now = fingerprint.read(fingerprint.begin({name: flat[name] for name in saved}))
        wrong = [name for name in saved if now[name] != saved[name]]
        what = ", ".join(f"{n} has the fingerprint {now[n]}, and had {saved[n]}" for n in wrong)
        every = all_gather(what)  # or one would go back alone
        if not any(every):
            return
        if not all(every):  # of a leaf that each has whole
            raise replica_error(step, every)
        what = f"its files are whole, but {what}"
        if not self._fall_back:
            raise damaged_error(self.directory, step, what)
        if self._lock is None and self._first is not False:
            raise layout.damaged_error(self.directory, step, what, self._owner)
        if self._lock is not None:  # or the next start would take it again
            what += f"; it was set aside as {layout.set_aside(self.directory, step)}"
            self.news.append(f"checkpoint {step} is damaged: {what}")
        raise SetAsideError(str(layout.damaged_error(self.directory, step, what, self._owner)))


def _check_json(about: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(about))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what is said about a checkpoint is kept as JSON, and this is not: {error}. "
            f"Give text, numbers, lists and dicts; float(x) makes a number of an array."
        ) from None
