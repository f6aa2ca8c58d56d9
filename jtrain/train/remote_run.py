"""Runs in an object store: checkpoints are uploaded while it trains, and fetched to resume."""

from collections.abc import Callable
from typing import Any

from jtrain.checkpoint import CheckpointManager, object_store_layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.config.top import BaseConfig
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import ConfigError, UserError
from jtrain.io.object_store import ObjectStore
from jtrain.io.regular_files import parse_json
from jtrain.train.run_dir import RunDir


def fetch_for_all(config: BaseConfig, run_dir: RunDir, processes: int) -> list[str]:
    """Fetch as `fetch_run` in the first process, while the others wait; return notices.

    Nothing is fetched if the config names no store.

    Raises:
        UserError: as `fetch_run`; with several processes a ConfigError in all of them.
    """
    if not config.checkpoint.store:
        return []
    if processes == 1:
        return fetch_run(config, run_dir)

    def fetch() -> dict[str, Any]:
        try:
            return {"news": fetch_run(config, run_dir)}
        except UserError as error:  # raised in all processes, or the others would wait for ever
            return {"news": [], "error": str(error)}

    result = broadcast_from_first(fetch)
    if message := result.get("error"):
        raise ConfigError(message)
    return result["news"] if run_dir.first else []


def fetch_run(config: BaseConfig, run_dir: RunDir) -> list[str]:
    """Fetch the newest copy of a run, if it is newer than the local checkpoints; return notices.

    Only for the first process.

    Raises:
        ConfigError: if the store holds another run of this name.
        ObjectStoreError: if the store cannot be read.
        CheckpointError: if another process writes in the run's directory.
    """
    store = _store(config)
    copies = object_store_layout.list_copies(store)
    owner = run_dir.owner()
    newest = CheckpointManager(run_dir.checkpoints, first=True, owner=owner).newest()
    newest = -1 if newest is None else newest
    if not copies:
        return []
    if owner is not None and owner.run not in (found := _ids(store)):
        raise ConfigError(
            f"{store.address} is the store of the run in {run_dir.path}, but it holds another run "
            f"of this name ({found[0] or 'without id'}). Give this run another name "
            f"(name={config.name}-2) or another checkpoint.store."
        )
    if copies[-1] <= newest:
        return []
    lock = WriteLock(run_dir.checkpoints)
    try:
        step, news = object_store_layout.fetch_newest(store, run_dir.path, above=newest)
    finally:
        lock.release()
    if step is None:
        return news
    return [*news, f"checkpoint {step} and the run's files were fetched from {store.address}"]


def start_uploader(
    config: BaseConfig, run_dir: RunDir, checkpoints: CheckpointManager
) -> CheckpointUploader | None:
    """Start and return the copier of a run's checkpoints; None if this process copies nothing.

    Raises:
        ObjectStoreError: if the store is not writable.
    """
    if not config.checkpoint.store or not run_dir.first:
        return None
    uploader = _build_uploader(config, run_dir, checkpoints.best, checkpoints.notices.append)
    uploader.begin()
    return uploader


def copy_finished(config: BaseConfig, run_dir: RunDir, step: int) -> None:
    """Copy the last checkpoint of a finished run, unless the store has it.

    Raises:
        SaveError: if the store does not take it.
    """
    if not config.checkpoint.store or not run_dir.first:
        return
    store = _store(config)
    if step not in object_store_layout.list_copies(store):
        checkpoints = CheckpointManager(
            run_dir.checkpoints, best=config.checkpoint.best, first=True, owner=run_dir.owner()
        )
        uploader = _build_uploader(config, run_dir, checkpoints.best, lambda line: None)
        uploader.begin()
        uploader.finish(step, missing=True)


def _store(config: BaseConfig) -> ObjectStore:
    return ObjectStore(f"{config.checkpoint.store.rstrip('/')}/{config.name}")


def _build_uploader(
    config: BaseConfig, run_dir: RunDir, best: Callable[[], int | None], tell: Callable[[str], None]
) -> CheckpointUploader:
    keep = config.checkpoint.keep
    return CheckpointUploader(_store(config), run_dir.path, keep=keep, best=best, log=tell)


def _ids(store: ObjectStore) -> list[str]:
    """Return the id of the run in the store, and the ids of the runs that it was copied from."""
    try:
        facts = parse_json(store.read("run.json") or b"{}")
        return [str(facts.get("id", "")), *facts.get("ancestors", {})]
    except (ValueError, AttributeError, TypeError):
        return [""]
