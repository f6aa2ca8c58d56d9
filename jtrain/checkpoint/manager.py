"""Checkpoint manager: saves the states of a run beside training, finds and restores them."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import (
    exit_barrier,
    layout,
    leaf_table,
    retention,
    save_errors,
    storage,
)
from jtrain.checkpoint.exit_barrier import ThreadTask
from jtrain.checkpoint.lock import NAME, WriteLock
from jtrain.checkpoint.newest_valid import (
    damaged_error,
    newest_valid,
    replica_error,
    shared_faults,
)
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.save_errors import SaveError, write_error
from jtrain.checkpoint.writer import CheckpointWriter, make_room
from jtrain.core import pytree
from jtrain.core.types import Leaf, Tree
from jtrain.distributed.multihost import all_gather
from jtrain.errors import CheckpointError, DamagedError, UnreachableError
from jtrain.io.disk_errors import attempt
from jtrain.parallel import fingerprint


class SetAsideError(DamagedError):
    """A requested checkpoint is damaged and was set aside: resume from another."""


class CheckpointManager(contextlib.AbstractContextManager):
    """Checkpoints in a directory: the newest `keep`, and the best by a metric.

    Construction costs nothing and changes nothing on the disk: a reader may inspect the directory
    while another process trains. One process writes at a time: the first `prepare`, `resume` or
    `save` locks the directory, `close` unlocks it. A program that ends without `close` (or `with`)
    waits for a save in progress; if the save fails, the program prints a line and exits with code
    70.

    In a run of several processes each makes a manager of the same shared directory, and each calls
    `save` with the same step.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        best: str = "",
        first: bool | None = None,
        fall_back: bool = True,
        owner: RunIdentity | None = None,
    ):
        """Configure the manager; the disk is not touched.

        Args:
            directory: of the checkpoints; shared by the processes of a run.
            keep: number of newest checkpoints to retain; 0 keeps all.
            keep_every: the first checkpoint at or after each multiple of it is retained too.
            best: `loss`, `lowest loss` or `highest accuracy`, or empty.
            first: whether this process is the first; None asks JAX, which starts the devices.
            fall_back: set a damaged checkpoint aside and use the one before it.
            owner: the run of the checkpoints: its id is sealed into each save, and a checkpoint of
                another run counts as damaged. None accepts those of any run.
        """
        self.directory = Path(directory).absolute()
        self._keep, self._keep_every, self._first = keep, keep_every, first
        self._metric = retention.BestMetric.parse(best)
        self._owner = owner
        self.notices: list[str] = []
        """Lines about checkpoints that were set aside as damaged."""
        self._writer = CheckpointWriter(
            self.directory,
            self._steps_to_delete,
            run=owner.run if owner else "",
        )
        self._lock: WriteLock | None = None
        self._fall_back = fall_back
        self._valid: set[int] = set()
        self._named: set[int] = set()  # names when the directory was locked, until `resume`
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
        """Save a state; return when its arrays may be donated, and write them beside training.

        A save in progress is waited for first, so that there is one copy of the state at a time. A
        checkpoint of the same step is replaced. Every process calls this.

        Args:
            state: any pytree of arrays, including typed keys.
            about: JSON to store with it: the config, versions, metrics.
            best_value: the metric by which the best is retained, if there is one.
            sealed: called with the step, in a thread, once the checkpoint survives a power cut.

        Raises:
            SaveError: if this save or the last one could not be written, with the reason.
            CheckpointError: if another process writes to the directory.
            DeviceError: if the replicas of a leaf differ between devices.
        """
        self.wait()
        self.acquire()
        arrays = leaf_table.flatten(state)
        layout.check_json(about)
        self._renew_lock(step, arrays)
        record = {
            "step": step,
            "leaves": pytree.describe(state),
            "fingerprints": {},
            "best": {
                "name": self._metric.name if self._metric else "",
                "value": best_value if best_value is None else float(best_value),
            },
            "about": dict(about),
        }
        # Everything is in the thread: a Ctrl-C interrupts the waiting, never JAX or Orbax. JAX
        # turns an interrupt into a ValueError, or takes half a trace for a complete one.
        copied = threading.Event()
        self._valid.discard(step)
        write = self._writer.write

        # A daemon: exit_barrier waits for it. After a failure, threads of Orbax wait 10 minutes
        # for one another.
        self._saving = ThreadTask(lambda: write(step, arrays, record, copied, sealed), daemon=True)
        exit_barrier.expect_close(self.close)
        self._saving.start()
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raise SaveError if a save has failed since the last call; never wait."""
        if self._saving is not None and self._saving.ended():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on the disk under its name.

        Raises:
            SaveError: if it could not be written; once for each save.
        """
        if self._saving is None:
            return
        error = self._saving.wait()
        self._saving = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save, then end the threads. Raise what `wait` raises."""
        try:
            self.wait()
        finally:
            exit_barrier.mark_closed(self.close)
            if self._preparing is not None:
                self._preparing.wait()
            self._writer.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return layout.list_steps(self.directory, self._owner)

    def newest(self) -> int | None:
        """Return the last complete step, if there is one; its bytes are not read."""
        return max(self.steps(), default=None)

    def is_valid(self, step: int) -> bool:
        """Return whether a checkpoint exists and every byte of it is as sealed."""
        return not layout.find_faults(self.directory, step, full=True, owner=self._owner)

    def resume(self) -> int | None:
        """Return the newest valid step, after reading every byte; for the process that trains.

        Newer damaged checkpoints, and all of another run, are set aside: renamed and not deleted;
        `notices` has a line for each. In a run of several processes all call this, and each reads
        its share.

        Raises:
            DamagedError: if the newest is damaged and `fall_back` is false, or a damaged one cannot
                be renamed.
            UnreachableError: if one cannot be read now, or the directory is away.
        """
        self.acquire()
        step, notices = newest_valid(
            self.directory, self._list_in_place, fall_back=self._fall_back, owner=self._owner
        )
        self._named = set()
        self._valid |= {step} if step is not None else set()
        self.notices += notices
        return step

    def remove(self, step: int) -> None:
        """Delete a checkpoint that the run no longer resumes from; in the writing process."""
        self.wait()
        self.acquire()
        self._named.discard(step)
        layout.delete_checkpoint(self.directory, step)

    def best(self) -> int | None:
        """Return the step with the best value, if any has one; the earliest of equals."""
        if self._metric is None:
            return None
        return retention.find_best(self.directory, self.steps(), self._metric)

    def about(self, step: int) -> dict[str, Any]:
        """Return the `about` of a save.

        Raises:
            CheckpointError: if the checkpoint does not exist.
        """
        self._list_in_place({step} & self._valid)
        return layout.read_record(self.directory, step)["about"]

    def restore(self, step: int, abstract: Tree, *, cast: bool = False) -> Tree:
        """Restore the state of a step with the structure and the shardings of `abstract`.

        Args:
            step: one of `steps()`.
            abstract: a pytree of arrays or of `jax.ShapeDtypeStruct`; a leaf without a sharding is
                restored as a numpy array. Devices and mesh axes may differ from those of the save.
            cast: allow leaves to have other dtypes than in the save.

        Raises:
            CheckpointError: if the checkpoint does not exist, or has another structure, shape or
                dtype, with a table of the differences; nothing is read then.
            DamagedError: if it is damaged, or a leaf that was read differs from the saved one: a
                SetAsideError in a process that writes here.
            DeviceError: if only some processes of a run read a leaf that differs.
        """
        self.wait()
        self._list_in_place({step} & self._valid)
        record = layout.read_record(self.directory, step)
        where = f"checkpoint {step} in {self.directory}"
        stored = leaf_table.check_same(record["leaves"], abstract, where, cast=cast)
        if step not in self._valid and (faults := shared_faults(self.directory, step, self._owner)):
            what = layout.summarize(faults)
            raise layout.damaged_error(self.directory, step, what, self._owner)
        try:
            flat = storage.read(self.directory / str(step) / layout.STATE, stored)
        except storage.UnreadableError as error:
            raise layout.damaged_error(self.directory, step, str(error), self._owner) from None
        self._check_fingerprints(step, record["fingerprints"], flat)
        return leaf_table.unflatten(
            abstract, leaf_table.cast_like(flat, abstract) if cast else flat
        )

    def check_room(self, state: Any, *, saves: int | None = None, steps: int = 0) -> None:
        """Raise unless the directory can take a run's checkpoints, or `saves`; before training.

        Args:
            saves: how many will be saved; None: many.
            steps: that the run will take, in each `keep_every` of which a checkpoint stays.

        Raises:
            CheckpointError: if it cannot be written, or the disk is too full for the retained
                checkpoints and the one in progress.
        """
        size = save_errors.disk_bytes(state)
        stay = steps // self._keep_every if self._keep_every else 0
        count = max(self._keep, 1) + 1 + (self._metric is not None) + stay
        more = count - min(len(self.steps()), count - 1)
        need = size * (more if saves is None else min(more, saves))
        save_errors.check_writable(self.directory, need)

    def prepare(self) -> None:
        """Load Orbax in the background, and remove what killed saves left.

        Only for the process that trains: before it restores, or once its first step is done.
        Without this, the first `save` does the same and takes a second longer.

        Raises:
            CheckpointError: if another process writes to the directory, or it cannot be written.
        """
        self.acquire()
        if self._preparing is None:
            self._preparing = ThreadTask(self._writer.open)
            self._preparing.start()

    def acquire(self) -> None:
        """Lock the directory before any expensive work, or check that no other machine has it now.

        Raises:
            CheckpointError: as `prepare`.
        """
        if self._lock is not None:
            self._lock.check()
        elif self._is_first():
            self._lock = WriteLock(self.directory)
            # Before anything is listed.
            attempt(self.directory, lambda: layout.restore_replaced(self.directory))
            self._named = set(layout.list_named_steps(self.directory))

    def remove_leftovers(self) -> None:
        """Remove what a process left that died at its very end, unless another one writes there."""
        if self._is_first() and os.path.exists(self.directory / NAME):
            with contextlib.suppress(CheckpointError):
                self.acquire()
                layout.clear_leftovers(self.directory)
            self.close()

    def make_room(self) -> list[int]:
        """Delete all checkpoints but the newest, the best and those of `keep_every`."""
        if not self._is_first():
            return []
        return make_room(self.directory, self.best(), self._keep_every)

    def _renew_lock(self, step: int, arrays: Mapping[str, Leaf]) -> None:
        """Check that this process may still write, and lock a removed directory again."""
        if self._lock is None:  # only the first process has one
            return
        try:
            self._lock.renew()
        except (OSError, UnreachableError) as error:
            raise write_error(self.directory, step, arrays, error) from None
        except CheckpointError as error:  # another process has locked the new directory
            what = f"checkpoint {step} could not be written: {str(error).rstrip('.')}"
            raise SaveError(what, "", room=False) from None

    def _list_in_place(self, some: Collection[int] = ()) -> list[int]:
        """Return the named steps; wait while the locked directory is away, or some are all gone."""
        some = some or self._named

        def look() -> list[int]:
            steps = layout.list_named_steps(self.directory)
            if (self._lock and not self._lock.is_in_place) or (some and not steps):
                raise OSError(errno.ESTALE, "its file system is away, or it was moved or emptied")
            return steps

        return attempt(self.directory, look)

    def _is_first(self) -> bool:
        return jax.process_index() == 0 if self._first is None else self._first

    def _steps_to_delete(self) -> list[int]:
        return retention.steps_to_delete(self.steps(), self._keep, self.best(), self._keep_every)

    def _check_fingerprints(
        self, step: int, saved: Mapping[str, str], flat: Mapping[str, Leaf]
    ) -> None:
        now = fingerprint.read(fingerprint.start({name: flat[name] for name in saved}))
        wrong = [name for name in saved if now[name] != saved[name]]
        what = ", ".join(f"{n} has the fingerprint {now[n]}, and had {saved[n]}" for n in wrong)
        differences = all_gather(what)  # else one process would roll back by itself
        if not any(differences):
            return
        if not all(differences):  # replicated leaves
            raise replica_error(step, differences)
        what = f"its files are valid, but {what}"
        if not self._fall_back:
            raise damaged_error(self.directory, step, what)
        if self._lock is None and self._first is not False:
            raise layout.damaged_error(self.directory, step, what, self._owner)
        if self._lock is not None:  # else the next start would use it again
            what += f"; it was set aside as {layout.set_aside(self.directory, step)}"
            self.notices.append(f"checkpoint {step} is damaged: {what}")
        raise SetAsideError(str(layout.damaged_error(self.directory, step, what, self._owner)))
