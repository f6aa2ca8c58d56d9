"""Copies of a run in an object store: fetched before a start, and uploaded beside training."""

from collections.abc import Callable
from typing import Any

from jtrain.checkpoint import CheckpointManager, object_store_layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.config.top import CheckpointConfig
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import FAULT, ConfigError, UnreachableError, UserError
from jtrain.io.disk_errors import may_pass
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

    def fetch_for_all(self, processes: int) -> list[str]:
        """Fetch the newest copy in the first process, while the others wait; return notices.

        Raises:
            ConfigError: if the store holds another run of this name.
            ObjectStoreError: if the store cannot be read.
            CheckpointError: if another process writes in the run's directory.
            UserError: with several processes, one of these as a ConfigError or UnreachableError.
        """
        if processes == 1:
            return self._fetch()

        def fetch() -> dict[str, Any]:
            try:
                return {"news": self._fetch()}
            except UserError as error:  # raised in all processes, or the others would wait for ever
                return {"error": str(error), "passes": may_pass(error) or error.code == FAULT}

        result = broadcast_from_first(fetch)
        if message := result.get("error"):
            raise UnreachableError(message) if result["passes"] else ConfigError(message)
        return result["news"] if self._run_dir.first else []

    def _fetch(self) -> list[str]:
        """Fetch the newest copy, if it is newer than the local checkpoints; return notices."""
        store, run_dir, owner = self._store, self._run_dir, self._run_dir.owner()
        copies = object_store_layout.list_copies(store)
        newest = self._local(owner).newest()
        above = -1 if newest is None else newest
        if not copies:
            return []
        if owner is not None and owner.run not in (found := _ids(store)):
            raise ConfigError(
                f"{store.address} is the store of the run in {run_dir.path}, but it holds another "
                f"run of this name ({found[0] or 'without id'}). Give this run another name "
                f"(name={self._name}-2) or another checkpoint.store."
            )
        if copies[-1] <= above:
            return []
        lock = WriteLock(run_dir.checkpoints)
        try:
            step, news = object_store_layout.fetch_newest(store, run_dir.path, above=above)
        finally:
            lock.release()
        if step is None:
            return news
        return [*news, f"checkpoint {step} and the run's files were fetched from {store.address}"]

    def start_uploader(
        self, checkpoints: CheckpointManager, log: Callable[[str], None] = lambda line: None
    ) -> CheckpointUploader:
        """Start and return the uploader of the run's checkpoints; only for the first process.

        Raises:
            ObjectStoreError: if the store is not writable.
        """
        keep, best = self._checkpoint.keep, checkpoints.best
        uploader = CheckpointUploader(
            self._store, self._run_dir.path, keep=keep, best=best, log=log
        )
        uploader.begin()
        return uploader

    def copy_finished(self, step: int) -> None:
        """Copy the last checkpoint of a finished run, unless the store has it.

        Raises:
            SaveError: if the store does not take it.
        """
        if self._run_dir.first and step not in object_store_layout.list_copies(self._store):
            checkpoints = self._local(self._run_dir.owner())
            self.start_uploader(checkpoints).finish(step, missing=True)

    def _local(self, owner: Any) -> CheckpointManager:
        return CheckpointManager(
            self._run_dir.checkpoints, best=self._checkpoint.best, first=True, owner=owner
        )


def _ids(store: ObjectStore) -> list[str]:
    """Return the id of the run in the store, and the ids of the runs that it was copied from."""
    try:
        facts = parse_json(store.read("run.json") or b"{}")
        return [str(facts.get("id", "")), *facts.get("ancestors", {})]
    except (ValueError, AttributeError, TypeError):
        return [""]
