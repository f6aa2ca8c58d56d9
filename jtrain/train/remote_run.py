"""A run whose checkpoints are copied to an object store: how it comes back, and who copies."""

from collections.abc import Callable
from typing import Any

from jtrain.checkpoint import CheckpointManager, object_store_layout
from jtrain.checkpoint.lock import Lock
from jtrain.checkpoint.object_store_copy import ObjectStoreCopy
from jtrain.config.top import BaseConfig
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import ConfigError, UserError
from jtrain.io.object_store import ObjectStore
from jtrain.io.regular_files import parse_json
from jtrain.train.run_dir import RunDir


def fetch_for_all(config: BaseConfig, there: RunDir, processes: int) -> list[str]:
    """Fetch as `fetch_run`, in the first process of several, while the others wait; return news.

    Nothing is fetched where the config names no store.

    Raises:
        UserError: as `fetch_run`; in all of several processes it is a ConfigError.
    """
    if not config.checkpoint.store:
        return []
    if processes == 1:
        return fetch_run(config, there)

    def fetch() -> dict[str, Any]:
        try:
            return {"news": fetch_run(config, there)}
        except UserError as error:  # or the others would wait for one that has ended
            return {"news": [], "refused": str(error)}

    found = broadcast_from_first(fetch)
    if words := found.get("refused"):
        raise ConfigError(words)
    return found["news"] if there.first else []


def fetch_run(config: BaseConfig, there: RunDir) -> list[str]:
    """Fetch the newest copy of a run, if it is newer than what its directory has; return news.

    Only for the first process.

    Raises:
        ConfigError: if another run of this name lies in the store.
        ObjectsError: if the store cannot be read.
        CheckpointError: if another process writes in the run's directory.
    """
    objects = _place(config)
    copies = object_store_layout.steps(objects)
    owner = there.owner()
    newest = CheckpointManager(there.checkpoints, first=True, owner=owner).newest()
    newest = -1 if newest is None else newest
    if not copies:
        return []
    if owner is not None and owner.run not in (found := _ids(objects)):
        raise ConfigError(
            f"{objects.address} was to hold copies of the run in {there.path}, and it holds "
            f"another run of this name ({found[0] or 'of no id'}). Give this one another name "
            f"(name={config.name}-2) or another checkpoint.store."
        )
    if copies[-1] <= newest:
        return []
    lock = Lock(there.checkpoints)
    try:
        step, news = object_store_layout.fetch_newest(objects, there.path, above=newest)
    finally:
        lock.release()
    if step is None:
        return news
    return [*news, f"checkpoint {step} and the run's files were fetched from {objects.address}"]


def make_mirror(
    config: BaseConfig, there: RunDir, checkpoints: CheckpointManager
) -> ObjectStoreCopy | None:
    """Return what copies the checkpoints of a run, begun; None where nothing is copied from here.

    Raises:
        ObjectsError: if the store takes nothing.
    """
    if not config.checkpoint.store or not there.first:
        return None
    mirror = _mirror(config, there, checkpoints.best, checkpoints.notices.append)
    mirror.begin()
    return mirror


def copy_finished(config: BaseConfig, there: RunDir, step: int) -> None:
    """Copy the last checkpoint of a run that is done, where a store has not got it.

    Raises:
        SaveError: if the store does not take it.
    """
    if not config.checkpoint.store or not there.first:
        return
    objects = _place(config)
    if step not in object_store_layout.steps(objects):
        mirror = _mirror(config, there, lambda: None, lambda line: None)
        mirror.begin()
        mirror.finish(step, missing=True)


def _place(config: BaseConfig) -> ObjectStore:
    return ObjectStore(f"{config.checkpoint.store.rstrip('/')}/{config.name}")


def _mirror(
    config: BaseConfig, there: RunDir, best: Callable[[], int | None], tell: Callable[[str], None]
) -> ObjectStoreCopy:
    keep = config.checkpoint.keep
    return ObjectStoreCopy(_place(config), there.path, keep=keep, best=best, log=tell)


def _ids(objects: ObjectStore) -> list[str]:
    """The id of the run that the copies are of, and of those that it was copied from."""
    try:
        facts = parse_json(objects.read("run.json") or b"{}")
        return [str(facts.get("id", "")), *facts.get("ancestors", {})]
    except (ValueError, AttributeError, TypeError):
        return [""]
