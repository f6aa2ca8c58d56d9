"""Uploads of checkpoints to an object store: each one, once it is sealed on the disk."""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from jtrain.checkpoint import object_store_layout, retention, seal
from jtrain.checkpoint.save_errors import SaveError, TakenError
from jtrain.io.log import LOG
from jtrain.io.object_store import ObjectStore, ObjectStoreError
from jtrain.io.regular_files import NEW, LinkError, check_no_link, parse_json


class CheckpointUploader:
    """Uploader of the checkpoints of one run, in its first process.

    A store has no locks. The process that began last is the one that copies: it leaves its id in an
    object, and an earlier process that finds another id before its next copy stops.
    """

    def __init__(
        self,
        objects: ObjectStore,
        path: Path,
        *,
        keep: int,
        keep_every: int = 0,
        best: Callable[[], int | None],
    ):
        """Configure the uploader.

        Args:
            keep_every: as `CheckpointManager` takes it.
            best: returns the best step, which is retained too.
        """
        self._objects, self._path, self._best = objects, path, best
        self._keep, self._keep_every = keep, keep_every
        self._name, self._missing = str(uuid.uuid4()), None

    def begin(self) -> None:
        """Announce that this process copies from now on.

        Raises:
            ObjectStoreError: if the store cannot be written.
        """
        process = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        record = {"name": self._name, **process}
        self._objects.write(object_store_layout.WRITER, json.dumps(record).encode())

    def copy(self, step: int) -> None:
        """Upload a checkpoint that is sealed on the disk, and the files of the run.

        Older copies are removed. A failure is logged; the next call uploads its own checkpoint, and
        the best one if that is the one that failed.

        Raises:
            TakenError: if another process has taken over.
        """
        self._check_owner()
        try:
            self._copy(step)
            self._missing = None
        except (ObjectStoreError, OSError) as error:
            self._missing = step
            LOG.warning(
                f"checkpoint {step} is on this disk and was not copied: {str(error).rstrip('.')}. "
                f"Training continues, and the next checkpoint is copied."
            )

    def finish(self, newest: int | None) -> None:
        """Upload the newest checkpoint if it is not in the store, and the final files of the run.

        Args:
            newest: the newest checkpoint of the run; None if it has none.

        Raises:
            SaveError: if the newest checkpoint is not in the store.
            TakenError: as `copy`.
        """
        self._check_owner()
        try:
            copies = object_store_layout.list_copies(self._objects)
            if newest is not None and (self._missing is not None or newest not in copies):
                self._copy(newest)
                self._missing = None
            self._copy_files()
        except (ObjectStoreError, OSError) as error:
            raise SaveError(
                f"checkpoint {newest} is valid in {self._path} and is not in "
                f"{self._objects.address}: {str(error).rstrip('.')}. Make the store writable, and "
                f"run again",
                ": it is copied then",
                room=False,
            ) from None

    def _copy(self, step: int) -> None:
        """Upload a checkpoint and the run's files, and the best checkpoint if it is missing."""
        copies = object_store_layout.object_sizes(self._objects)
        for other in [n for n in copies if n > step]:  # from before a rollback
            object_store_layout.remove(self._objects, other, copies.pop(other))
        best, steps = self._best(), [step]
        if best is not None and best < step and seal.SEAL not in copies.get(best, {}):
            steps = [best, step]
        for one in steps:
            if one in copies:
                object_store_layout.remove(self._objects, one, copies[one])
            for file in seal.list_files(self._checkpoint(one)):
                self._send(one, file)
        self._copy_files()
        for one in steps:  # the seal goes last, and makes the copy complete
            self._send(one, seal.SEAL)
        self._remove_others(step, best)

    def _checkpoint(self, step: int) -> Path:
        return self._path / object_store_layout.CHECKPOINTS / str(step)

    def _send(self, step: int, file: str) -> None:
        """Upload a file of a checkpoint."""
        name = f"{object_store_layout.CHECKPOINTS}/{step}/{file}"
        self._objects.send(self._checkpoint(step) / file, name)

    def _copy_files(self) -> None:
        """Upload the files of the run's directory, and its pictures; skip links."""
        for path in sorted([*self._path.iterdir(), *(self._path / "pictures").glob("*.png")]):
            try:
                check_no_link(path.parent if path.parent != self._path else path)
                check_no_link(path)
            except LinkError:
                continue
            # What training writes meanwhile is incomplete, and gone when it is to be read.
            if path.is_file() and not path.name.startswith(".") and path.suffix != NEW:
                self._objects.send(path, path.relative_to(self._path).as_posix())

    def _remove_others(self, step: int, best: int | None) -> None:
        """Remove older copies that are not retained, and what killed copies left."""
        copies = object_store_layout.object_sizes(self._objects)
        complete = [n for n, sizes in copies.items() if seal.SEAL in sizes]
        removed = {
            *retention.steps_to_delete(complete, self._keep, best, self._keep_every),
            *(copies.keys() - set(complete)),
        } - {step}
        for other in sorted(removed):
            object_store_layout.remove(self._objects, other, copies[other])

    def _check_owner(self) -> None:
        try:
            found = parse_json(self._objects.read(object_store_layout.WRITER) or b"{}")
        except ObjectStoreError:
            return  # the upload that follows raises it
        except ValueError:
            LOG.warning(
                f"{self._objects.address}/{object_store_layout.WRITER} is unreadable: another "
                f"process that copies this run would not be noticed"
            )
            return
        if isinstance(found, dict) and found.get("name", self._name) != self._name:
            raise TakenError(
                f"{self._objects.address}: process {found.get('pid')} on {found.get('host')} has "
                f"taken over the copies of this run. This run ends, and its checkpoints stay in "
                f"{self._path}. To keep both runs, give one another name: name=..."
            )
