"""Copies of a run in an object store: fetched before a start, and uploaded beside training."""

from typing import Any

from jtrain.checkpoint import CheckpointManager, object_store_layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.config.top import CheckpointConfig
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import ConfigError
from jtrain.io.log import LOG
from jtrain.io.object_store import ObjectStore
from jtrain.io.regular_files import parse_json
from jtrain.train.run_dir import RunDir


class RemoteRun:
    """The copies of a run in an object store.

    Args:
        run_dir: the run on this machine.
        name: of the run; its copies are in `checkpoint.store`/NAME.
        checkpoint: where the copies are, and which of them are retained.
    """

    def __init__(self, run_dir: RunDir, name: str, checkpoint: CheckpointConfig):
        self._run_dir, self._name, self._checkpoint = run_dir, name, checkpoint
        self._store = ObjectStore(f"{checkpoint.store.rstrip('/')}/{name}")

    def fetch_for_all(self, processes: int) -> None:
        """Fetch the newest copy in the first process, while the others wait.

        Raises:
            ConfigError: if the store holds another run of this name.
            ObjectStoreError: if the store cannot be read.
            CheckpointError: if another process writes in the run's directory.
        """
        # Broadcasting starts the devices, and a single process has nothing to wait for.
        found = self._fetch() if processes == 1 else broadcast_from_first(self._fetch)
        for line in found["notices"]:
            LOG.info(line)

    def _fetch(self) -> dict[str, Any]:
        """Fetch the newest copy, if it is newer than the local checkpoints; return notices."""
        store, path = self._store, self._run_dir.path
        copies, newest = object_store_layout.list_copies(store), self._local().newest()
        above = -1 if newest is None else newest
        owner = self._run_dir.owner()
        if copies and owner and owner.run not in (found := self._ids()):
            raise ConfigError(
                f"{store.address} is the store of the run in {path}, but it holds another run of "
                f"this name ({found[0] or 'without id'}). Give this run another name "
                f"(name={self._name}-2) or another checkpoint.store."
            )
        if not copies or copies[-1] <= above:
            return {"notices": []}
        lock = WriteLock(self._run_dir.checkpoints)
        try:
            step, notices = object_store_layout.fetch_newest(store, path, above=above)
        finally:
            lock.release()
        if step is not None:
            notices.append(
                f"checkpoint {step} and the run's files were fetched from {store.address}"
            )
        return {"notices": notices}

    def start_uploader(self, checkpoints: CheckpointManager) -> CheckpointUploader:
        """Start and return the uploader of the run's checkpoints; only for the first process.

        Raises:
            ObjectStoreError: if the store is not writable.
        """
        keep, best, path = self._checkpoint.keep, checkpoints.best, self._run_dir.path
        uploader = CheckpointUploader(self._store, path, keep=keep, best=best)
        uploader.begin()
        return uploader

    def copy_finished(self, step: int) -> None:
        """Copy the last checkpoint of a finished run, unless the store has it.

        Raises:
            SaveError: if the store does not take it.
        """
        if self._run_dir.first and step not in object_store_layout.list_copies(self._store):
            self.start_uploader(self._local()).finish(step, missing=True)

    def _local(self) -> CheckpointManager:
        run_dir, best = self._run_dir, self._checkpoint.best
        return CheckpointManager(run_dir.checkpoints, best=best, first=True, owner=run_dir.owner())

    def _ids(self) -> list[str]:
        """Return the id of the stored run, and the ids of the runs that it was copied from."""
        stored = self._store.read("run.json") or b"{}"
        try:
            facts = parse_json(stored)
            return [str(facts.get("id", "")), *facts.get("ancestors", {})]
        except (ValueError, AttributeError, TypeError):
            return [""]
