"""Parameters of a run of `jt.fit`, read without its script."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jtrain.checkpoint import inspect, layout
from jtrain.config.lookup import FIT, find_experiment
from jtrain.config.node import FILE, without_origins
from jtrain.config.read import read
from jtrain.core import pytree
from jtrain.core.types import Extra, Params
from jtrain.errors import CheckpointError, ConfigError

TREE = "tree"
"""Entry of a checkpoint's record: the tree of the parameters and of `extra`."""


def is_fit_run(directory: Path) -> bool:
    """Return whether `jt.fit` made the run in a directory."""
    config = directory / "config.yaml"
    if _values(config).get("experiment") != FIT:
        return False
    try:
        find_experiment(FIT, config)
    except ConfigError:
        return True
    return False


def read_weights(
    directory: Path, step: int | Literal["newest", "best"] = "newest"
) -> tuple[int, Params, Extra]:
    """Return a step, and its parameters and extra in the dicts, lists and tuples of the call.

    The parameters are those to use; with `ema`, the average.

    Raises:
        ConfigError: if the optimizer computes the parameters to use from its own state.
        CheckpointError: if there is no such checkpoint.
    """
    optimizer = _values(directory / "config.yaml").get("optimizer", {})
    if optimizer.get("kind") == "schedule_free":
        raise ConfigError(
            f"{directory} was made by jt.fit with schedule_free, which computes the parameters to "
            f"use from its state. Repeat the same call of jt.fit: its result has them."
        )
    checkpoints = directory / "checkpoints"
    found = inspect.resolve_step(checkpoints, step)
    layout.check_valid(checkpoints, found)
    record = layout.read_record(checkpoints, found)
    leaves, entries = record["leaves"], record["about"].get(TREE)
    sources = {name: name for name in leaves if name.partition("/")[0] in {"params", "extra"}}
    if optimizer.get("ema"):
        sources |= {name: _average(name, leaves) for name in sources if name.startswith("params")}
    arrays = inspect.read_arrays(checkpoints, found, list(sources.values()))
    try:
        weights = build_tree(iter(entries), lambda name: arrays[sources[name]])
        return found, weights["params"], weights["extra"]
    except (StopIteration, LookupError, TypeError, ValueError, RecursionError):
        raise CheckpointError(
            f"checkpoint {found} in {checkpoints} does not describe the tree of its parameters: it "
            f"was not written by this version of jtrain. Repeat the same call of jt.fit: its "
            f"result has them."
        ) from None


def describe_tree(tree: Any) -> list[Any]:
    """Return the nodes of a tree, each before its children, as JSON: a leaf is its name.

    A name alone does not say whether a slash is part of a key, `0` is a number, or a sequence is a
    tuple. A node of another library becomes a dict.
    """
    entries: list[Any] = []

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
        if node is None or (children and not children[0][0]):
            entries.append(None if node is None else pytree.name(path))
            return
        if type(node) in (list, tuple):
            entries.append([type(node).__name__, len(node)])
        else:
            entries.append(["dict", *(_key(inner[0]) for inner, _ in children)])
        for inner, child in children:
            visit(child, (*path, *inner))

    visit(tree, ())
    return entries


def build_tree(entries: Iterator[Any], leaf: Callable[[str], Any]) -> Any:
    """Return the tree that `describe_tree` described, with `leaf` of each name."""
    entry = next(entries)
    if entry is None or isinstance(entry, str):
        return entry and leaf(entry)
    kind, *keys = entry
    if kind == "dict":
        return {key: build_tree(entries, leaf) for key in keys}
    children = [build_tree(entries, leaf) for _ in range(*keys)]
    return tuple(children) if kind == "tuple" else children


def _key(key: Any) -> str | int | float:
    """Return the key, name or index in an entry of a path, as JSON can hold it."""
    found = next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))
    return found if isinstance(found, str | int | float) else str(found)


def _average(name: str, leaves: Mapping[str, str]) -> str:
    """Return the leaf with the average of a parameter; a frozen parameter has none but itself."""
    ending = f"/average/{name.partition('/')[2]}"
    return next((leaf for leaf in leaves if leaf.endswith(ending)), name)


def _values(config: Path) -> dict[str, Any]:
    values = without_origins(read(config, FILE)[0])
    assert isinstance(values, dict), "a config is a mapping, or it could not be read"
    return values
