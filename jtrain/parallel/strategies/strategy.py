"""What a strategy is: where arrays live, and who sums the gradients."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered

from jtrain.core.placement import Placement
from jtrain.core.pytree import named_leaves
from jtrain.core.gradient import GradientSharding
from jtrain.core.types import Batch, Dims, Params
from jtrain.errors import ConfigError, RetraceError
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.program_cache import load_or_compile


@runtime_checkable
class Strategy(Protocol):
    """Lays pure functions of (state, batch) out over devices; sees no loss and no optimizer."""

    @property
    def shares(self) -> int:
        """How many parts the rows of a batch are split into, over all processes."""
        ...

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch's rows this process has on its devices, of how many: 1 of 4.

        Processes whose devices hold the same rows have the same part.
        """
        ...

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes of the mesh and their sizes; none on one device."""
        ...

    @property
    def placement(self) -> Placement:
        """What models name their dims to."""
        ...

    @property
    def schedule(self) -> PipelineSchedule | None:
        """Of the pipeline, if layers are in stages."""
        ...

    @property
    def psum(self) -> Callable[[Any], Any] | None:
        """Sums a pytree over the copies of the step; None where the compiler sums."""
        ...

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Where each leaf of a state lives, in a tree of its structure.

        `dims` names the dims of parameters, by the parameters' names (`Experiment.dims`).
        """
        ...

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Sequence[LeafSharding]:
        """Where each leaf goes, and why; none where all go the same way."""
        ...

    def refuse_unused_axes(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Checks, once a loss was traced, that each axis of the mesh is of use.

        Raises:
            ShardingError: with what to type instead of one that is not.
        """
        ...

    def gradient_sharding(self, params: Params, dims: Mapping[str, Dims] = {}, /) -> GradientSharding:
        """Where the step puts gradients and copies of these parameters."""
        ...

    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """This process's rows, on its devices as a part of the global batch."""
        ...

    def lower(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Lowered:
        """`fn(state, batch)`, traced for arrays like these, placed; `.compile()` makes a program.

        `stacked`: arrays of the batch are k b ... instead of b .... `keeps`: `fn` gives back a new
        state first of two; the old one is donated.
        """
        ...

    def compile(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Callable:
        """What `lower` traced, compiled now; a call with other shapes raises RetraceError."""
        ...


class StrategyBase(abc.ABC):
    """Compiles what it lowers, once."""

    schedule: PipelineSchedule | None = None

    def refuse_unused_axes(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Rows are split over all there are."""
        del tree, dims

    @abc.abstractmethod
    def lower(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Lowered:
        """As `Strategy.lower`."""

    def compile(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Callable:
        """As `Strategy.compile`."""
        lowered = self.lower(fn, state, batch, stacked=stacked, keeps=keeps)
        return _once(load_or_compile(lowered, state), *plain(state, batch))


def plain(state: Any, batch: Any) -> tuple[Any, Any]:
    """Both as shapes and dtypes alone, so that compiling holds no arrays."""
    return jax.eval_shape(lambda s, b: (s, b), state, batch)


def _once(program: Any, *abstract: Any) -> Callable:
    """The program for such arrays; anything else given to it is an error."""

    def call(state: Any, batch: Any) -> Any:
        try:
            return program(state, batch)
        except (TypeError, ValueError) as error:
            changes = _differences(abstract, (state, batch))
            advice = "Keep shapes fixed: pad a short batch under its mask."
            if not changes:
                changes = _moved(program.input_shardings[0], (state, batch))
                advice = "Place a batch by strategy.place, a state by strategy.shardings(state)."
            if not changes:
                raise
            raise RetraceError(
                "the step was compiled once and was now given other arrays:\n  "
                + "\n  ".join(changes)
                + f"\n{advice}"
            ) from error

    return call


def check_divides(batch: int, shares: int, microbatches: int, *, name: str = "batch") -> None:
    """Checks that the rows of a batch split evenly.

    Raises:
        ConfigError: with the nearest sizes that do.
    """
    unit = shares * microbatches
    if batch % unit:
        lower, upper = batch // unit * unit, math.ceil(batch / unit) * unit
        nearest = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"{name}: {batch} rows do not divide into {shares} devices x {microbatches} "
            f"microbatches = {unit} parts. Nearest: {nearest} ({name}={lower or upper})."
        )


class PlacedBatchCache:
    """Puts the arrays of a batch on devices, and those that come again only once.

    `row` and `mask` of full batches are the same read-only numpy objects at every step.
    """

    def __init__(self, put: Callable[[dict], dict]):
        self._put = put
        self._seen: dict[str, tuple[np.ndarray, jax.Array]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """`batch` on the devices.

        Several threads may call: one reads ahead while another evaluates, whose mask is another.
        """
        known = {name: self._seen.get(name) for name in batch}  # one look; it may change meanwhile
        again = {k: seen[1] for k, seen in known.items() if seen and seen[0] is batch[k]}
        fresh = self._put({name: array for name, array in batch.items() if name not in again})
        for name, placed in fresh.items():
            array = batch[name]
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                self._seen[name] = array, placed
        return {name: again[name] if name in again else fresh[name] for name in batch}


def same_for_all(tree: Any, sharding: Sharding) -> Any:
    """`sharding` for each leaf."""
    return jax.tree.map(lambda _: sharding, tree)


def _differences(expected: Any, got: Any) -> list[str]:
    def signature(tree: Any) -> dict[str, str]:
        return {
            name: f"{jax.numpy.result_type(leaf)}{list(np.shape(leaf))}"
            for name, leaf in named_leaves(tree).items()
        }

    before, after = signature(expected), signature(got)
    return [
        f"{_said(n)}: was {before.get(n, 'absent')}, is {after.get(n, 'absent')}"
        for n in {**before, **after}
        if before.get(n) != after.get(n)
    ]


def _moved(expected: Any, got: Any) -> list[str]:
    """The leaves that lie elsewhere than the program takes them from."""
    wanted = named_leaves(expected)
    return [
        f"{_said(n)}: was laid out as {wanted[n]}, is as {leaf.sharding}"
        for n, leaf in named_leaves(got).items()
        if n in wanted and isinstance(leaf, jax.Array)
        if not leaf.sharding.is_equivalent_to(wanted[n], leaf.ndim)
    ]


def _said(name: str) -> str:
    """`0/params/w` as `state/params/w`."""
    return {"0": "state", "1": "batch"}[name[0]] + name[1:]
