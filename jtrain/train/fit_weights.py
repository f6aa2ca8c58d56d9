"""Parameters of a run of `jt.fit`, read without its script."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

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
    leaves, tree = record["leaves"], record["about"].get(TREE)
    sources = {name: name for name in leaves if name.partition("/")[0] in {"params", "extra"}}
    if optimizer.get("ema"):
        sources |= {name: _average(name, leaves) for name in sources if name.startswith("params")}
    arrays = inspect.read_arrays(checkpoints, found, list(sources.values()))
    try:
        names = ast.literal_eval(tree)
        weights = jax.tree.map(lambda name: arrays[sources[name]], names)
        return found, weights["params"], weights["extra"]
    except (LookupError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        raise CheckpointError(
            f"checkpoint {found} in {checkpoints} does not describe the tree of its parameters: it "
            f"was not written by this version of jtrain. Repeat the same call of jt.fit: its "
            f"result has them."
        ) from None


def describe_tree(tree: Any) -> str:
    """Return a tree as a literal of Python, in which a leaf is its name.

    A name alone does not say whether a slash is part of a key, `0` is a number, or a sequence is a
    tuple. A node of another library becomes a dict.
    """

    def plain(node: Any, path: tuple[Any, ...]) -> Any:
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
        if node is None or (children and not children[0][0]):
            return None if node is None else pytree.name(path)
        inner = [(key[0], plain(child, (*path, *key))) for key, child in children]
        if type(node) in (list, tuple):
            return type(node)(x for _, x in inner)
        return {_key(key): x for key, x in inner}

    return repr(plain(tree, ()))


def _key(key: Any) -> str | int | float:
    """Return the key, name or index in an entry of a path, as a literal can hold it."""
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
