"""Checkpoint writer: write, seal and announce one checkpoint, then delete older ones."""

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import exit_barrier, layout, retention, seal, storage
from jtrain.checkpoint.save_errors import TakenError, announce_error, unsealed_error, write_error
from jtrain.core.types import Leaf
from jtrain.errors import CheckpointError, DeviceError, UnreachableError
from jtrain.io.log import LOG
from jtrain.io.regular_files import read_json
from jtrain.parallel import fingerprint
from jtrain.parallel.fingerprint import ReplicaPrints

_COPIES = "copies-"


class CheckpointWriter:
    """Writer of the checkpoints of a directory, one at a time, in threads of its callers."""

    def __init__(
        self,
        directory: Path,
        steps_to_delete: Callable[[], list[int]],
        *,
        run: str = "",
    ):
        self._directory, self._steps_to_delete = directory, steps_to_delete
        self._run = run
        self._logged: set[str] = set()
        self._writer: storage.ArrayWriter | None = None
        self._open_lock = threading.Lock()
        self._left: set[Path] = set()  # of failed saves, where Orbax may still be writing

    def open(self) -> storage.ArrayWriter:
        """Return the array writer; the first call loads Orbax and removes leftovers."""
        with self._open_lock:
            if self._writer is None:
                if jax.process_index() == 0:
                    layout.clear_leftovers(self._directory)
                self._writer = storage.ArrayWriter()
            return self._writer

    def close(self) -> None:
        """End the threads; the next save starts others."""
        writer, self._writer = self._writer, None  # a Ctrl-C leaves no half-closed one
        if writer is not None:
            with contextlib.suppress(
                OSError, ValueError, RuntimeError
            ):  # reported at the end of the save
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
        """Save a checkpoint; set `copied` when the arrays may be donated, or the save has failed.

        Raises:
            SaveError: if it could not be written, by this process or by the one that seals.
            DeviceError: if the replicas of a leaf differ between devices.
        """
        folder: Path | None = None
        opened = -1
        is_lost = committed = False
        try:
            sums = fingerprint.start(arrays)
            writer = self.open()
            self._clear()
            if jax.process_index() == 0:
                folder = layout.create_saving_path(self._directory, step)
                opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # shows a move
            writer.start(layout.saving_path(self._directory, step) / layout.STATE, arrays)
            copied.set()
            replicas = fingerprint.local_prints(sums)
            writer.finish()
            if jax.process_count() > 1:
                writer.barrier(f"{step} written")
                path = layout.saving_path(self._directory, step)
                storage.seal_own_folder(path / layout.STATE, step)
                _write_prints(path, replicas)
                writer.barrier(f"{step} copies")
            try:
                if folder is not None:
                    self._commit(folder, opened, step, record, replicas)
                    committed = True
                    sealed(step)
                    self._delete_older(step)
            finally:
                is_lost = self._is_unsealed(step, writer)
        except TakenError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # from the disk and Orbax
            self._clear(folder)
            if committed:
                raise announce_error(self._directory, step, error) from None
            exit_barrier.expect_forced_exit()
            raise write_error(self._directory, step, arrays, error) from None
        except DeviceError:
            self._clear(folder)
            raise
        finally:
            copied.set()
            if opened >= 0:
                os.close(opened)
        if is_lost:
            raise unsealed_error(self._directory, step)

    def _is_unsealed(self, step: int, writer: storage.ArrayWriter) -> bool:
        """Return whether the first process failed to seal the step, at a barrier of all.

        A second barrier lets all of them check first: the first process may delete the step a
        moment later, for a rollback.
        """
        writer.barrier(f"{step} sealed")
        try:
            others = jax.process_index() > 0
            return others and seal.sealed_step(self._directory / str(step)) != step
        finally:
            with contextlib.suppress(
                RuntimeError
            ):  # a process has died since, after the step was sealed
                writer.barrier(f"{step} checked")

    def _commit(
        self,
        folder: Path,
        opened: int,
        step: int,
        record: dict[str, Any],
        replicas: ReplicaPrints,
    ) -> None:
        """Seal and commit what was written, unless devices disagree or the folder was moved."""
        if jax.process_count() > 1:
            replicas = _read_all_prints(folder, replicas)
        record["fingerprints"] = fingerprint.check_replicas(replicas, step)
        if not os.path.samestat(os.fstat(opened), os.stat(folder)):
            # Moved, and created again: Orbax creates the parents of each file that it writes.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder}")
        layout.commit(folder, record, self._run)

    def _clear(self, failed: Path | None = None) -> None:
        """Remove what failed saves left, including `failed`, and once more at the next call.

        A thread of Orbax may still write there, and create the folder again.
        """
        new = {failed} if failed is not None else set()
        for path in self._left | new:
            layout.try_remove(path)
        self._left = {path for path in self._left if path.exists()} | new

    def _delete_older(self, saved: int) -> None:
        """Delete older checkpoints; never the one that was read and sealed a moment ago.

        A refused deletion is logged once and tried again at the next save: the sealed checkpoint is
        valid.
        """
        try:
            steps = self._steps_to_delete()
        except UnreachableError as error:
            return self._log_once(f"older checkpoints stay: {error}")
        for step in steps:
            if step == saved:
                continue
            try:
                layout.delete_checkpoint(self._directory, step)
            except CheckpointError as error:
                if step in layout.list_named_steps(self._directory):  # else it is a leftover now
                    self._log_once(f"an older checkpoint stays: {error}")
        layout.clear_deleted(self._directory)

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            LOG.warning(line)


def _write_prints(folder: Path, found: ReplicaPrints) -> None:
    """Write the fingerprints of this process for the first one, their digest in the file's name."""
    (folder / f"{_COPIES}{_digest(found)}.{jax.process_index()}").write_text(json.dumps(found))


def _read_all_prints(folder: Path, own: ReplicaPrints) -> ReplicaPrints:
    """Return the fingerprints of all processes, and remove their files.

    Files with the same digest as that of this process, `own`, are not read.

    Raises:
        FileNotFoundError: if a file is missing: the file system does not show it here yet.
    """
    files = list(folder.glob(f"{_COPIES}*"))
    if len(files) != jax.process_count():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder / _COPIES}*")
    if all(file.stem == f"{_COPIES}{_digest(own)}" for file in files):
        found = own
    else:
        found = _merge(read_json(file, inside=folder) for file in files)
    for file in files:
        file.unlink()
    return found


def _digest(found: ReplicaPrints) -> str:
    text = json.dumps({name: sorted(prints) for name, prints in sorted(found.items())})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _merge(tables: Iterable[ReplicaPrints]) -> ReplicaPrints:
    found: ReplicaPrints = {}
    for table in tables:
        for name, prints in table.items():
            merged = found.setdefault(name, {})
            for print_, devices in prints.items():
                merged.setdefault(print_, []).extend(devices)
    return found


def make_room(directory: Path, best: int | None, keep_every: int) -> list[int]:
    """Delete all but the newest, the best and those of `keep_every`; return the steps."""
    deleted = []
    for step in retention.steps_to_delete(layout.list_steps(directory), 1, best, keep_every):
        with contextlib.suppress(CheckpointError):  # a failing disk may refuse a deletion
            layout.delete_checkpoint(directory, step)
            deleted.append(step)
    return deleted
