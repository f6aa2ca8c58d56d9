"""Mirror: each checkpoint of a run copied to an object store, once it is sealed on the disk."""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from jtrain.checkpoint import object_store_layout, retention, seal
from jtrain.checkpoint.save_errors import SaveError, TakenError
from jtrain.io.object_store import ObjectStore, ObjectStoreError
from jtrain.io.regular_files import LinkError, check_no_link, parse_json


class ObjectStoreCopy:
    """Copies of the checkpoints of one run, written by its first process.

    A store has no locks. Whoever began last is the one who copies: he leaves his name in an object,
    and an earlier one, who finds another name there before his next copy, ends.
    """

    def __init__(
        self,
        objects: ObjectStore,
        path: Path,
        *,
        keep: int,
        best: Callable[[], int | None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None,
    ):
        """`path` is the run's directory; `keep` newest copies stay and the `best`; `tell` takes a
        line for each copy that fails."""
        self._objects, self._path, self._keep, self._best = objects, path, keep, best
        self._tell, self._name, self._owed = tell, str(uuid.uuid4()), None

    def begin(self) -> None:
        """Say that this process copies here from now on.

        Raises:
            ObjectsError: if the store takes nothing.
        """
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        said = {"name": self._name, **who}
        self._objects.write(object_store_layout.WRITER, json.dumps(said).encode())

    def copy(self, step: int) -> None:
        """Copy a checkpoint that is sealed on the disk, and the run's files; then older ones go.

        What the store refuses is told, and owed to the next copy.

        Raises:
            TakenError: if another process copies there since.
        """
        self._refuse_another()
        try:
            self._copy(step)
            self._owed = None
        except (ObjectStoreError, OSError) as error:
            self._owed = step
            self._tell(
                f"checkpoint {step} is on this disk and was not copied: {error} Training goes on; "
                f"the next one is copied in its place."
            )

    def finish(self, newest: int | None, *, owed: bool = False) -> None:
        """Copy what is owed, and the files of the run as they are at its end.

        Args:
            newest: the newest checkpoint of the run.
            owed: whether it was not copied, as far as is known; a copy that failed is known here.

        Raises:
            SaveError: if the newest checkpoint is not in the store.
            TakenError: as `copy`.
        """
        self._refuse_another()
        try:
            if (owed or self._owed is not None) and newest is not None:
                self._copy(newest)
                self._owed = None
            self._copy_files()
        except (ObjectStoreError, OSError) as error:
            raise SaveError(
                f"checkpoint {newest} is whole in {self._path} and is not in "
                f"{self._objects.address}: {error}",
                ": it is copied then",
                room=False,
            ) from None

    def _copy(self, step: int) -> None:
        objects, place = self._objects, self._path / object_store_layout.CHECKPOINTS / str(step)
        there = object_store_layout.listed(objects)
        for other in [n for n in there if n > step]:  # of what the run has gone back from
            object_store_layout.remove(objects, other, there[other])
        if step in there:
            object_store_layout.remove(objects, step, there[step])
        for file in seal.files(place):
            objects.send(place / file, f"{object_store_layout.CHECKPOINTS}/{step}/{file}")
        self._copy_files()
        objects.send(place / seal.SEAL, f"{object_store_layout.CHECKPOINTS}/{step}/{seal.SEAL}")
        self._remove_others(step)

    def _copy_files(self) -> None:
        """The files of the run's directory, and its pictures; links are left out."""
        for path in sorted([*self._path.iterdir(), *(self._path / "pictures").glob("*.png")]):
            try:
                check_no_link(path.parent if path.parent != self._path else path)
                check_no_link(path)
            except LinkError:
                continue
            if path.is_file() and not path.name.startswith("."):
                self._objects.send(path, path.relative_to(self._path).as_posix())

    def _remove_others(self, step: int) -> None:
        """Remove older copies that need not stay, and what killed copies have left."""
        there = object_store_layout.listed(self._objects)
        whole = [n for n, sizes in there.items() if seal.SEAL in sizes]
        best = self._best()
        gone = {*retention.dispensable(whole, self._keep, best), *(there.keys() - set(whole))} - {
            step
        }
        for other in sorted(gone):
            object_store_layout.remove(self._objects, other, there[other])

    def _refuse_another(self) -> None:
        try:
            found = parse_json(self._objects.read(object_store_layout.WRITER) or b"{}")
        except (ObjectStoreError, ValueError):
            return  # the copy itself will say what is wrong
        if isinstance(found, dict) and found.get("name", self._name) != self._name:
            raise TakenError(
                f"{self._objects.address} was to be written by this process, and process "
                f"{found.get('pid')} on {found.get('host')} has taken it over since. This run "
                f"ends, and what it saved stays in {self._path}. To have both, give one another "
                f"name: name=..."
            )
