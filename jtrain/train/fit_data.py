"""Data of `jt.fit`, `jt.evaluate` and `jt.predict`, and the parameters of a stored fit."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jtrain.checkpoint import inspect as checkpoints_of
from jtrain.checkpoint import layout
from jtrain.config.lookup import FIT, find_experiment
from jtrain.config.node import FILE, without_origins
from jtrain.config.read import read
from jtrain.core import pytree
from jtrain.core.batches import Batches, FiniteBatches
from jtrain.core.types import Extra, Params
from jtrain.data import Arrays, InOrder, LoaderBatches, Shuffled, Source
from jtrain.data.sources.arrays import hold_out
from jtrain.data.sources.foreign import (
    HuggingFace,
    TorchRows,
    check_names,
    from_loader,
    get_columns,
    is_array,
    library_name,
    to_array,
)
from jtrain.errors import CheckpointError, ConfigError, DataError
from jtrain.errors.plain_numbers import to_number
from jtrain.io.safetensors import read_metadata, read_tensors, write_safetensors

# Arrays by name; an array `x` or a pair `(x, y)`; a source of rows by index; or batches.
Data: TypeAlias = Any


def build_train_batches(data: Data, size: int | None, *, seed: int) -> Batches:
    """Return training batches: every row once an epoch, 32 rows a batch if `size` is None.

    Raises:
        DataError: if the data has no rows.
        ConfigError: if the data is in batches of another size already.
    """
    size = size or loader_size(data)
    data = _of_generator(_of_torch(data))
    if not isinstance(data, Batches):
        return Shuffled(_source(data), size=size or 32, seed=seed)
    if size not in (None, data.size):
        raise ConfigError(
            f"batch={size} was given, but the data is in batches of {data.size} rows: omit batch=, "
            f"or give the rows themselves, a source or arrays."
        )
    return data


def loader_size(data: Data) -> int | None:
    """Return the batch size of a torch DataLoader; None for anything else."""
    torch = sys.modules.get("torch.utils.data")
    if torch is None or not isinstance(data, torch.DataLoader):
        return None
    return getattr(data.batch_sampler, "batch_size", data.batch_size)


def split_validation(data: Data, valid: Data) -> tuple[Data, Data]:
    """Return the training and the validation data; a share as `valid` is held out of the data.

    Raises:
        ConfigError: for a share that is not between 0 and 1, or leaves either without rows.
        DataError: if the data has no rows by index.
    """
    valid = to_number(valid)
    if isinstance(valid, int):
        raise ConfigError(f"valid={valid}: write a share, valid=0.2, or rows, valid=(x, y).")
    if not isinstance(valid, float):
        return data, valid
    if inspect.isroutine(data) or isinstance(data, Batches | functools.partial):
        raise ConfigError(f"valid={valid:g} is a share of rows, not of batches: valid=(x, y).")
    source = _source(_of_torch(data))
    validation_rows = round(len(source) * valid)
    if not 0 < validation_rows < len(source):
        raise ConfigError(
            f"valid={valid:g} of {len(source)} rows would hold out {validation_rows} rows. Write a "
            f"share such as valid=0.2, or give the rows: valid=(x, y)."
        )
    return hold_out(source, valid)


def build_batches(data: Data, size: int) -> FiniteBatches:
    """Return batches of `size` rows that go over the data once, in its order.

    Raises:
        DataError: if the data has no rows, or is in batches that never end.
    """
    data = _of_torch(data)
    if isinstance(data, FiniteBatches):
        return data
    if isinstance(data, Batches):
        raise DataError(
            f"A {type(data).__name__} never ends, but a finite data set is needed: give its rows, "
            f"a source or arrays, or jtrain.data.InOrder(rows, size={data.size})."
        )
    return InOrder(_source(data), size=size)


def build_evaluation_sets(
    valid: Data, size: int
) -> FiniteBatches | Mapping[str, FiniteBatches] | None:
    """Return the evaluation sets of a run: one, several by name, or None."""
    if isinstance(valid, Mapping) and any(_has_rows(x) for x in valid.values()):
        return {name: build_batches(data, size) for name, data in valid.items()}
    return None if valid is None else build_batches(valid, size)


def _source(data: Data) -> Source:
    data = to_array(data)
    if (table := get_columns(data)) is not None:
        return Arrays(**table)
    if isinstance(data, Mapping):
        check_names(data, "dict(x=..., y=...).")
        return Arrays(**{str(name): to_array(array) for name, array in data.items()})
    if isinstance(data, tuple) and len(data) == 2:
        return Arrays(x=to_array(data[0]), y=to_array(data[1]))
    if is_array(data):
        return Arrays(x=data)
    if library_name(data) == "datasets":
        return HuggingFace(data)
    if isinstance(data, Source) and not isinstance(data, list | tuple | str):
        return data
    raise DataError(
        f"Data is arrays by name, (x, y), a source of rows or batches, and this is a "
        f"{type(data).__name__}. {_data_advice(data)}"
    )


def _data_advice(data: Data) -> str:
    if library_name(data) == "tensorflow":
        return (
            "Write jtrain.data.LoaderBatches(data.as_numpy_iterator, size=32), of batches by name."
        )
    if isinstance(data, str):
        return (
            "Read a file first: np.load(FILE). Turn text into tokens, jtrain data prepare FILE "
            "--out FOLDER, and tokens into rows: jtrain.data.Windows(TokenFiles(FOLDER), "
            "context=64)."
        )
    if isinstance(data, tuple):
        return f"Give {len(data)} arrays names: dict(x=..., y=..., weight=...)."
    if hasattr(data, "__iter__") and not isinstance(data, str | list):
        return (
            "For data that can only be read in order, give a function that opens it: "
            "jtrain.data.LoaderBatches(lambda: batches_by_name(), size=32)."
        )
    return "Give arrays: dict(x=np.asarray(...), y=np.asarray(...))."


def _of_generator(data: Data) -> Any:
    """Return the batches of a function that yields them; anything else as it is."""
    if isinstance(data, Iterator) and not isinstance(data, Source):
        raise DataError(
            f"The data is a {type(data).__name__}, which can be read once, and a run may read a "
            f"batch again. Give the function that makes it: fit(loss, model, batches), where def "
            f"batches(): yields (x, y), (x, y, weight) or arrays by name."
        )
    function = inspect.isroutine(data) or isinstance(data, functools.partial)
    if not function or isinstance(data, Batches | Source):
        return data
    name = getattr(data, "__name__", "the function")

    def batches() -> Iterator[Mapping[str, Any]]:
        found = data()
        if isinstance(found, Mapping | tuple):
            raise DataError(f"{name}() returns one batch. Let it yield batches instead.")
        for batch in found:
            yield {key: to_array(array) for key, array in _by_name(batch, name).items()}

    if (first := next(batches(), None)) is None:
        raise DataError(f"{name}() yields no batch. Let it yield (x, y) at least once.")
    return LoaderBatches(batches, size=len(next(iter(first.values()))))


def _by_name(batch: Any, function: str) -> Mapping[str, Any]:
    """Return a batch that `function` yielded, by name: `(x, y, weight)`, `(x, y)` or one array."""
    if isinstance(batch, Mapping):
        return batch
    several = isinstance(batch, tuple) or (isinstance(batch, list) and all(map(is_array, batch)))
    arrays = batch if several else (batch,)  # torch collates a pair to a list
    if len(arrays) > 3:
        raise DataError(f"{function}() yields {len(arrays)} arrays: yield dict(x=..., y=...).")
    return dict(zip(("x", "y", "weight"), arrays, strict=False))


def _of_torch(data: Data) -> Any:
    """Return a torch DataLoader or data set as rows, or as batches if it streams; else `data`."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(data, torch.DataLoader):
        return from_loader(data)
    if torch is not None and isinstance(data, torch.Dataset) and hasattr(data, "__len__"):
        return TorchRows(data, torch.default_collate)
    return data


def _has_rows(x: Any) -> bool:
    """Return whether `x` is a data set, not an array of one."""
    x = _of_torch(x)
    if is_array(x) or isinstance(x, list):
        return False
    return isinstance(x, Mapping | tuple | Batches | Source)


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
    found = checkpoints_of.resolve_step(checkpoints, step)
    layout.check_valid(checkpoints, found)
    record = layout.read_record(checkpoints, found)
    leaves, tree = record["leaves"], record["about"].get(TREE)
    sources = {name: name for name in leaves if name.partition("/")[0] in {"params", "extra"}}
    if optimizer.get("ema"):
        sources |= {name: _average(name, leaves) for name in sources if name.startswith("params")}
    arrays = checkpoints_of.read_arrays(checkpoints, found, list(sources.values()))
    params, extra = _build_tree(
        tree,
        {name: arrays[source] for name, source in sources.items()},
        f"checkpoint {found} in {checkpoints}",
    )
    return found, params, extra


def _build_tree(tree: Any, arrays: Mapping[str, Any], where: str) -> tuple[Params, Extra]:
    """Return the parameters and extra of a tree that `describe_tree` wrote."""
    try:
        weights = jax.tree.map(lambda name: arrays[name], ast.literal_eval(tree))
        return weights["params"], weights["extra"]
    except (LookupError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        raise CheckpointError(
            f"{where} does not describe the tree of its parameters: it was not written by this "
            f"version of jtrain. Repeat the same call of jt.fit: its result has them."
        ) from None


def write_weights(path: Path, params: Params, extra: Extra, step: int) -> None:
    """Write parameters and extra to a .safetensors file, which `read_weights_file` reads.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    weights = {"params": params, "extra": extra}
    leaves = {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(weights).items()}
    write_safetensors(path, leaves, {TREE: describe_tree(weights), "step": str(step)})


def read_weights_file(path: Path) -> tuple[int, Params, Extra]:
    """Return the step of a file of `write_weights`, and its parameters and extra.

    Raises:
        CheckpointError: if it is no such file.
    """
    about, arrays = read_metadata(path), read_tensors(path)
    if TREE not in about:
        raise CheckpointError(
            f"{path} has no tree of parameters: jt.load reads files of result.save, and runs."
        )
    return int(about.get("step", 0)), *_build_tree(about.get(TREE), arrays, str(path))


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
