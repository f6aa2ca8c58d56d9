"""Weights sources: a checkpoint of a run, or a file of tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import jax
import numpy as np

from jtrain.checkpoint import directory_entries, inspect, layout, leaf_table, storage
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.top import RUNS
from jtrain.core.types import Leaf
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError
from jtrain.io.hub import is_hub_name
from jtrain.io.object_store import is_address
from jtrain.io.safetensors import INDEX_SUFFIX, SUFFIX, read_tensors
from jtrain.models.pretrained.folder import check_no_pickle
from jtrain.models.pretrained.source import PretrainedWeights, is_pretrained


@runtime_checkable
class WeightsSource(Protocol):
    """Source of arrays by name."""

    where: str
    """Name in messages."""
    found: Mapping[str, jax.ShapeDtypeStruct]
    """Shape and dtype of each array. Values beside the parameters are named extra/NAME."""

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read these arrays with the requested shardings and dtypes; numpy without a sharding."""
        ...


class TensorFile:
    """Tensors of a file, with slashes for the dots in their names."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._arrays = {name.replace(".", "/"): array for name, array in read_tensors(path).items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self._arrays.items()
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read each shard once, for its device."""
        return {name: place_array(self._arrays[name], leaf) for name, leaf in wanted.items()}


class CheckpointWeights:
    """Parameters of a checkpoint, and its other values (extra/)."""

    def __init__(self, directory: Path, step: int):
        layout.check_valid(directory, step)
        record = layout.read_record(directory, step)
        self.where = str(directory / str(step))
        self._directory, self._step = directory, step
        self._stored = {_name(stored): stored for stored in record["leaves"] if _name(stored)}
        described = {name: record["leaves"][stored] for name, stored in self._stored.items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: leaf_table.parse_leaf(text)
            for name, text in described.items()
            if not text.startswith("key<")
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read directly from the disk into the requested shardings."""
        abstract = {self._stored[name]: leaf for name, leaf in wanted.items()}
        path = Path(self._directory).absolute() / str(self._step) / layout.STATE
        try:
            flat = storage.read(path, abstract, some=True)
        except storage.UnreadableError as error:
            raise layout.damaged_error(self._directory, self._step, str(error)) from None
        return {name: flat[self._stored[name]] for name in wanted}


def open_source(
    path: str,
    step: Literal["newest", "best"] = "newest",
    owner_of: Callable[[Path], RunIdentity | None] = lambda run: None,
    *,
    stacked: bool = False,
) -> WeightsSource:
    """Open the source at `path`: a run, a checkpoint, a file of tensors or a published model.

    What is on this disk comes before a name on the Hub.

    Args:
        path: as `init_from.path`.
        step: which checkpoint of a run.
        owner_of: returns the required owner of the checkpoints in the directory of a run; those of
            others are skipped. By default any owner is accepted.
        stacked: the blocks of a published model are requested as one array each.

    Raises:
        CheckpointError: if the path is none of them, or the run has no such checkpoint.
    """
    if is_address(path):
        raise CheckpointError(
            f"init_from.path={path} is in an object store, and parameters are read from this disk. "
            f"Fetch the run, and name its local copy: jtrain ckpt fetch {path}"
        )
    if path.endswith((SUFFIX, INDEX_SUFFIX)):
        return TensorFile(Path(path))
    check_no_pickle(Path(path))
    if is_pretrained(Path(path)):
        return PretrainedWeights(Path(path), stacked=stacked)
    try:
        directory, named = inspect.find_checkpoint(path)
    except directory_entries.OutsideError:
        raise
    except CheckpointError as error:
        if is_hub_name(path) and Path(path).parts[0] != RUNS.name:
            return PretrainedWeights(path, stacked=stacked)
        raise CheckpointError(
            f"init_from.path={error} Or name a file of tensors ({SUFFIX}), a folder with "
            f"config.json, or org/name of the Hub."
        ) from None
    if named is not None:
        return CheckpointWeights(directory, named)
    owner = owner_of(directory.parent)
    # The run may save meanwhile: every process uses the step that the first one found.
    search = lambda: {"step": inspect.resolve_step(directory, step, owner, "init_from.step=")}
    return CheckpointWeights(directory, broadcast_from_first(search)["step"])


def place_array(array: np.ndarray, abstract: Leaf) -> Leaf:
    """Cast and shard `array` like `abstract`, each device with its own shard."""
    sharding = getattr(abstract, "sharding", None)
    if sharding is None:
        return array.astype(abstract.dtype)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.array(array[index], abstract.dtype)
    )


def _name(stored: str) -> str:
    """Return `blocks/0/kernel` for `params/blocks/0/kernel`; empty for a leaf outside the model."""
    group, _, name = stored.partition("/")
    return {"params": name, "extra": stored}.get(group, "")
