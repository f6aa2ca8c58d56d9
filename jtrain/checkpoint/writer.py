"""One save: written, sealed, announced, and then the older ones go."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import exit_barrier, fingerprint, layout, replica_check, retention, storage
from jtrain.checkpoint.save_errors import TakenError, failed, unannounced, unsealed
from jtrain.core.types import Leaf
from jtrain.errors import CheckpointError, DeviceError
from jtrain.io.same_file import HeldFolder


class CheckpointWriter:
    """Writes the checkpoints of a directory, one at a time, in threads that others begin."""

    def __init__(
        self,
        directory: Path,
        dispensable: Callable[[], list[int]],
        tell: Callable[[str], object],
        *,
        run: str = "",
    ):
        """`dispensable` gives the steps that may go when one was saved, `tell` takes a line.

        `run` is the id that is sealed into each.
        """
        self._directory, self._dispensable, self._tell = directory, dispensable, tell
        self._run = run
        self._told: set[str] = set()
        self._writer: storage.ArrayWriter | None = None
        self._opening = threading.Lock()
        self._left: set[Path] = set()  # of failed saves, where Orbax may still have been writing

    def open(self) -> storage.ArrayWriter:
        """What writes; the first call loads Orbax and removes what killed saves left."""
        with self._opening:
            if self._writer is None:
                if jax.process_index() == 0:
                    layout.clear_leftovers(self._directory, self._tell_once)
                self._writer = storage.ArrayWriter()
            return self._writer

    def close(self) -> None:
        """Ends its threads; the next save begins others."""
        writer, self._writer = self._writer, None  # a Ctrl-C leaves none that is half ended
        if writer is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # told when it finished
                writer.close()
        self._clear()

    def write(
        self,
        step: int,
        arrays: Mapping[str, Leaf],
        record: dict[str, Any],
        copied: threading.Event,
        sealed: Callable[[int], None],
    ) -> None:
        """The whole of a save; sets `copied` when the arrays may be donated, or it has failed.

        Raises:
            SaveError: if it could not be written, by this process or by that which seals.
            DeviceError: if devices hold copies of a leaf that are not the same.
        """
        begun: HeldFolder | None = None
        lost = committed = False
        try:
            prints = fingerprint.begin(arrays)
            writer = self.open()
            self._clear()
            if jax.process_index() == 0:
                begun = HeldFolder(layout.begin(self._directory, step))
            writer.start(layout.saving_path(self._directory, step) / layout.STATE, arrays)
            copied.set()
            seen = replica_check.seen(prints)
            writer.finish()
            if jax.process_count() > 1:
                replica_check.tell(layout.saving_path(self._directory, step), seen)
                writer.meet(f"{step} copies")
            try:
                if begun is not None:
                    self._commit(begun, step, record, seen)
                    committed = True
                    sealed(step)
                    self._delete_dispensable(step)
            finally:
                lost = self._lost(step, writer)
        except TakenError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # what the disk and Orbax raise
            self._clear(begun)
            if committed:
                raise unannounced(self._directory, step, error) from None
            exit_barrier.save_failed()
            raise failed(self._directory, step, arrays, error) from None
        except DeviceError:
            self._clear(begun)
            raise
        finally:
            copied.set()
            if begun is not None:
                begun.close()
        if lost:
            raise unsealed(self._directory, step)

    def _lost(self, step: int, writer: storage.ArrayWriter) -> bool:
        """Whether the first process, when all have come here, has not sealed the step.

        None goes on before all have looked: the first may delete it a moment later, to go back.
        """
        writer.meet(f"{step} sealed")
        try:
            others = jax.process_index() > 0
            return others and bool(layout.find_faults(self._directory, step, full=False))
        finally:
            with contextlib.suppress(RuntimeError):  # one is gone since: of no matter to this step
                writer.meet(f"{step} seen")

    def _commit(
        self, begun: HeldFolder, step: int, record: dict[str, Any], seen: replica_check.Seen
    ) -> None:
        """Seal what was written, under its name, unless devices disagree or the folder is gone."""
        seen = replica_check.of_all(begun.path) if jax.process_count() > 1 else seen
        record["fingerprints"] = replica_check.agreed(seen, step)
        if not begun.is_there:  # moved; Orbax makes the folders of each file anew
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{begun.path}")
        layout.commit(begun.path, record, self._run)

    def _clear(self, failed: HeldFolder | None = None) -> None:
        """Remove what failed saves left, this one among them."""
        self._left |= {failed.path} if failed is not None else set()
        for path in self._left:
            layout.clear(path)
        self._left = {path for path in self._left if path.exists()}

    def _delete_dispensable(self, saved: int) -> None:
        """Deletes older ones; never the one whose bytes were read and sealed a moment ago.

        What is refused is told of once, and tried again at the next save: the one that was sealed
        is whole.
        """
        for step in self._dispensable():
            if step == saved:
                continue
            try:
                layout.delete(self._directory, step)
            except CheckpointError as error:
                if step in layout.named_steps(self._directory):  # else it is a leftover from now on
                    self._tell_once(f"an older checkpoint stays: {error}")
        layout.clear_deleted(self._directory, self._tell_once)

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)


def spare(directory: Path, best: int | None) -> list[int]:
    """The steps that went, so that there is room: all but the newest and the best."""
    gone = []
    for step in retention.dispensable(layout.steps(directory), 1, best):
        with contextlib.suppress(CheckpointError):  # a disk that is hurt may refuse a deletion
            layout.delete(directory, step)
            gone.append(step)
    return gone
