"""Parameters of a run of `jt.fit`, read without its script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jtrain.checkpoint import inspect, layout
from jtrain.config.lookup import FIT, find_experiment
from jtrain.config.node import FILE, without_origins
from jtrain.config.read import read
from jtrain.core.types import Extra, Params
from jtrain.errors import ConfigError


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
    """Return a step, and its parameters and extra in dicts and lists by the names of the leaves.

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
    leaves = layout.read_record(checkpoints, found)["leaves"]
    sources = {name: name for name in leaves if name.partition("/")[0] in {"params", "extra"}}
    if optimizer.get("ema"):
        sources |= {name: _average(name, leaves) for name in sources if name.startswith("params")}
    arrays = inspect.read_arrays(checkpoints, found, list(sources.values()))
    weights = unflatten({name: arrays[stored] for name, stored in sources.items()})
    return found, weights["params"], weights.get("extra", ())


def unflatten(leaves: Mapping[str, np.ndarray]) -> Any:
    """Return leaves by name as nested dicts; keys that count from 0 on make a list.

    `{"a/0/w": x, "a/1/w": y}` becomes `{"a": [{"w": x}, {"w": y}]}`.
    """
    if "" in leaves:
        return leaves[""]
    inner: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in leaves.items():
        first, _, rest = name.partition("/")
        inner.setdefault(first, {})[rest] = leaf
    children = {name: unflatten(rest) for name, rest in inner.items()}
    is_list = sorted(children) == sorted(map(str, range(len(children))))
    return [children[str(i)] for i in range(len(children))] if is_list else children


def _average(name: str, leaves: Mapping[str, str]) -> str:
    """Return the leaf with the average of a parameter; a frozen parameter has none but itself."""
    ending = f"/average/{name.partition('/')[2]}"
    return next((leaf for leaf in leaves if leaf.endswith(ending)), name)


def _values(config: Path) -> dict[str, Any]:
    values = without_origins(read(config, FILE)[0])
    assert isinstance(values, dict), "a config is a mapping, or it could not be read"
    return values
