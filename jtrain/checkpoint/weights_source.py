"""Where parameters to start from lie: a checkpoint of a run, or a file of tensors."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import jax
import numpy as np

from jtrain.checkpoint import directory_entries, layout, leaf_table, record_check, storage
from jtrain.checkpoint.manager import CheckpointManager
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.tensors import ENDING, INDEX, tensors
from jtrain.config.suggestions import did_you_mean
from jtrain.core.types import Leaf
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError
from jtrain.io.object_store import is_address

RUNS = Path("runs")


@runtime_checkable
class WeightsSource(Protocol):
    """Arrays that can be had by name."""

    where: str
    """What messages call it."""
    found: Mapping[str, jax.ShapeDtypeStruct]
    """What each is. What stands beside the parameters is called extra/NAME."""

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """These, laid out and of the dtype as they are wanted; numpy where no sharding is said."""
        ...


class TensorFile:
    """The tensors of a file, dots in their names as slashes."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._arrays = {name.replace(".", "/"): array for name, array in tensors(path).items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self._arrays.items()
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Each device is given its part, and no part more than once."""
        return {name: place(self._arrays[name], leaf) for name, leaf in wanted.items()}


class CheckpointWeights:
    """A checkpoint: its parameters, and what stands beside them."""

    def __init__(self, directory: Path, step: int):
        layout.check(directory, step)
        record = layout.record(directory, step)
        self.where = str(directory / str(step))
        self._directory, self._step = directory, step
        self._kept = {_name(kept): kept for kept in record["leaves"] if _name(kept)}
        described = {name: record["leaves"][kept] for name, kept in self._kept.items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: leaf_table.stored(said)
            for name, said in described.items()
            if not said.startswith("key<")
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Straight from the disk into where they are wanted."""
        like = {self._kept[name]: leaf for name, leaf in wanted.items()}
        path = Path(self._directory).absolute() / str(self._step) / layout.STATE
        try:
            flat = storage.read(path, like, some=True)
        except storage.UnreadableError as error:
            raise layout.damaged_error(self._directory, self._step, str(error)) from None
        return {name: flat[self._kept[name]] for name in wanted}


def find(
    path: str,
    step: Literal["newest", "best"] = "newest",
    owner_of: Callable[[Path], RunIdentity | None] = lambda run: None,
) -> WeightsSource:
    """What lies at `path`: a run, or its name in runs/, a checkpoint, or a file of tensors.

    Args:
        path: as `init_from.path`.
        step: which checkpoint of a run.
        owner_of: gives the run that the checkpoints in a run's directory should be of; those of
            others are passed over. By default they may be of any.

    Raises:
        CheckpointError: if none of them does, or the run has no such checkpoint.
    """
    if is_address(path):
        raise CheckpointError(
            f"init_from.path={path} is in an object store, and parameters are read from this disk. "
            f"Fetch the run, and name it: jtrain ckpt fetch {path}"
        )
    if path.endswith((ENDING, INDEX)):
        return TensorFile(Path(path))
    for place in (Path(path), RUNS / path):
        if (place / layout.ABOUT).is_file() and place.name.isdigit():
            return CheckpointWeights(place.parent, int(place.name))
        for directory in (place / "checkpoints", place):
            if layout.steps(directory, owner := owner_of(directory.parent)):
                # The run may go on meanwhile: every process takes what the first has found.
                look = functools.partial(_look, directory, step, owner)
                return CheckpointWeights(directory, broadcast_from_first(look)["step"])
    every = (d for d in RUNS.glob("*/checkpoints") if not directory_entries.leads_outside(d))
    kept = filter(layout.steps, every)
    there = sorted(directory.parent.name for directory in kept)
    near = did_you_mean(Path(path).name, there)
    raise CheckpointError(
        f"init_from.path={path} is no run with a checkpoint, no checkpoint and no file of tensors "
        f"({ENDING}). In runs/ there is {', '.join(there) or 'none'}{near}; write its name, or the "
        f"path of a file."
    )


def place(array: np.ndarray, like: Leaf) -> Leaf:
    """`array` as `like` is: of its dtype and in its sharding, each device given its part."""
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return array.astype(like.dtype)
    part = lambda index: np.array(array[index], like.dtype)
    return jax.make_array_from_callback(array.shape, sharding, part)


def _look(
    directory: Path, which: Literal["newest", "best"], owner: RunIdentity | None
) -> dict[str, int]:
    return {"step": _step(directory, which, owner)}


def _step(directory: Path, which: Literal["newest", "best"], owner: RunIdentity | None) -> int:
    newest = layout.steps(directory, owner)[-1]
    if which == "newest":
        return newest
    goal = record_check.asked_best(layout.record(directory, newest)["about"])
    best = CheckpointManager(directory, best=goal, owner=owner).best()
    if best is None:
        raise CheckpointError(
            f"init_from.step=best was asked of {directory}, and it was kept by no metric "
            f"(checkpoint.best={goal or 'empty'}). Write init_from.step=newest, or the path of one "
            f"of its checkpoints: {', '.join(map(str, layout.steps(directory)))}."
        )
    return best


def _name(kept: str) -> str:
    """`blocks/0/kernel` for `params/blocks/0/kernel`; empty for what is no part of a model."""
    part, _, name = kept.partition("/")
    return {"params": name, "extra": kept}.get(part, "")
