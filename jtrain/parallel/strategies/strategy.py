"""Strategies: placement of arrays on devices, and reduction of gradients."""

import abc
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding
from jax.stages import Lowered
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.registry import Kind
from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.loss import Stateful
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch, Dims, LossFn, Params
from jtrain.errors import ConfigError, DataError, RetraceError
from jtrain.parallel.devices import Devices
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.program_cache import load_or_compile


class Strategy(abc.ABC):
    """Executor of pure functions of (state, batch) over devices, for any loss and optimizer.

    A strategy defines `shares`, `shardings`, `place` and `lower`. The other members, such as a
    mesh, named dims or a pipeline, have the defaults of one device.
    """

    schedule: PipelineSchedule | None = None
    loop: str = "jtrain.core.loop:train_loop"
    """Address of the loop that takes the steps of a run; others have the arguments of
    `train_loop`, and `setup` and `directory`."""

    @property
    @abc.abstractmethod
    def shares(self) -> int:
        """Number of shards of the rows of a batch, over all processes."""

    @abc.abstractmethod
    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Return the sharding of each leaf of a state, in a tree of its structure.

        `dims` names the dims of parameters, by the parameters' names (`Experiment.dims`).
        """

    @abc.abstractmethod
    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """Place this process's rows on its devices, as a shard of the global batch."""

    def place_for_call(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """Place rows that only the next call of a compiled program reads, and nothing may write.

        On a CPU they may stay numpy arrays: the call takes them sooner than another program.
        """
        return self.place(batch, stacked=stacked)

    @abc.abstractmethod
    def lower(
        self,
        fn: Callable,
        state: Any,
        batch: Any,
        /,
        *,
        stacked: bool = False,
        returns_state: bool = False,
    ) -> Lowered:
        """Lower `fn(state, batch)` for such arrays; `.compile()` of the result makes a program.

        `stacked`: arrays of the batch are k b ... instead of b .... `returns_state`: `fn` returns a
        new state and another result; the old state is donated.
        """

    def compile(
        self,
        fn: Callable,
        state: Any,
        batch: Any,
        /,
        *,
        stacked: bool = False,
        returns_state: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Callable:
        """Lower and compile; a call with other shapes raises RetraceError.

        `meanwhile` is called between the two: what Python does from here on, XLA works beside.
        """
        lowered = self.lower(fn, state, batch, stacked=stacked, returns_state=returns_state)
        meanwhile()
        return self._load(lowered, state, batch, returns_state=returns_state)

    def _load(self, lowered: Lowered, state: Any, batch: Any, *, returns_state: bool) -> Callable:
        """Return what runs the lowered function; `returns_state` says whether it is the step."""
        del returns_state
        return _once(load_or_compile(lowered, state), *plain(state, batch))

    @property
    def part(self) -> tuple[int, int]:
        """Index of this process's shard of the rows, and the number of shards: 1 of 4.

        Processes whose devices have the same rows have the same shard.
        """
        return 0, 1

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes of the mesh and their sizes; none on one device."""
        return {}

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """Options of the compiler that `lower` sets."""
        return {}

    @property
    def placement(self) -> Placement:
        """Placement for models that name their dims; by default without constraints."""
        return Unplaced()

    @property
    def psum(self) -> Callable[[Any], Any] | None:
        """Sum of a pytree over the replicas of the step; None if the compiler sums."""
        return None

    def optimizer(self, rule: optax.GradientTransformation, /) -> optax.GradientTransformation:
        """Return the transformation whose state the run has: by default the rule itself."""
        return rule

    def loss(self, loss: LossFn | Stateful, dims: Mapping[str, Dims] = {}, /) -> LossFn | Stateful:
        """Return the loss as it is traced: by default the loss itself."""
        del dims
        return loss

    def gradient_sharding(
        self, params: Params, dims: Mapping[str, Dims] = {}, /
    ) -> GradientSharding:
        """Return the sharding of gradients and compute copies of these parameters."""
        del params, dims
        return NO_SHARDING

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Sequence[LeafSharding]:
        """Return the sharding of each leaf, with the reason; empty if all leaves are alike."""
        del tree, dims
        return ()

    def check_axes_used(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Raise, after a loss was traced, unless each axis of the mesh is used.

        Raises:
            ShardingError: with the unused axis and the settings to change.
        """
        del tree, dims


def plain(state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the shapes and dtypes of both, so that compiling holds no arrays."""
    return jax.eval_shape(lambda s, b: (s, b), state, batch)


def _once(program: Any, *abstract: Any) -> Callable:
    """Return the program, which raises RetraceError for other arrays."""

    def call(state: Any, batch: Any) -> Any:
        try:
            return program(state, batch)
        except (TypeError, ValueError) as error:
            changes = _differences(abstract, (state, batch))
            advice = "Keep shapes fixed: pad a short batch under its mask."
            if not changes:
                with contextlib.suppress(ValueError):  # a leaked tracer is one more input
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
    """Raise unless the rows of a batch split evenly.

    Raises:
        ConfigError: with the nearest sizes.
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
    """Placement of batches on devices, with a cache of repeated arrays.

    `row` and `mask` of full batches are the same read-only numpy objects at every step.
    """

    def __init__(self, put: Callable[[dict], dict]):
        self._put = put
        self._cached: dict[str, tuple[np.ndarray, jax.Array]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """Place `batch` on the devices.

        Several threads may call: one prefetches while another evaluates with another mask.

        Raises:
            DataError: if a whole number does not fit the type that it has on the devices.
        """
        # One read of the cache: another thread may change it.
        cached = {name: self._cached.get(name) for name in batch}
        hits = {k: entry[1] for k, entry in cached.items() if entry and entry[0] is batch[k]}
        missing = {name: array for name, array in batch.items() if name not in hits}
        for name, array in missing.items():
            _check_whole_numbers(name, array)
            if isinstance(array, np.ndarray) and not array.dtype.isnative:  # of a user's batches
                missing[name] = array.astype(array.dtype.newbyteorder("="))
        fresh = self._put(missing) if missing else {}
        for name, placed in fresh.items():
            array = batch[name]
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                self._cached[name] = array, placed
        return {name: hits[name] if name in hits else fresh[name] for name in batch}


def _check_whole_numbers(name: str, array: Any) -> None:
    """Raise DataError if JAX would cut a whole number of 64 bits to its last 32."""
    if not (isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size):
        return
    target = jax.dtypes.canonicalize_dtype(array.dtype)
    if target == array.dtype:
        return
    least, most = int(array.min()), int(array.max())
    fits = np.iinfo(target)
    if least < fits.min or most > fits.max:
        raise DataError(
            f"`{name}` holds {least if least < fits.min else most}, and devices hold {target} in "
            f"place of {array.dtype}, up to {fits.max}. Number the values from 0, "
            f"np.unique({name}, return_inverse=True)[1], or leave {name} out."
        )


def same_for_all(tree: Any, sharding: Sharding) -> Any:
    """Return `sharding` for each leaf."""
    return jax.tree.map(lambda _: sharding, tree)


def _differences(expected: Any, actual: Any) -> list[str]:
    def signature(tree: Any) -> dict[str, str]:
        return {
            name: f"{jax.numpy.result_type(leaf)}{list(np.shape(leaf))}"
            for name, leaf in named_leaves(tree).items()
        }

    before, after = signature(expected), signature(actual)
    return [
        f"{_argument_name(n)}: was {before.get(n, 'absent')}, is {after.get(n, 'absent')}"
        for n in {**before, **after}
        if before.get(n) != after.get(n)
    ]


def _moved(expected: Any, actual: Any) -> list[str]:
    shardings = named_leaves(expected)
    return [
        f"{_argument_name(n)}: was sharded as {shardings[n]}, is as {leaf.sharding}"
        for n, leaf in named_leaves(actual).items()
        if n in shardings and isinstance(leaf, jax.Array)
        if not leaf.sharding.is_equivalent_to(shardings[n], leaf.ndim)
    ]


def _argument_name(name: str) -> str:
    """Return `0/params/w` as `state/params/w`."""
    return {"0": "state", "1": "batch"}[name[0]] + name[1:]


@configclass
class BaseParallelConfig(Kind):
    """Fields of every kind of `parallel`. A layout defines `build(among) -> Strategy`."""

    devices: Devices = 0
    """Devices of each process: their number, 0 for all; their indices, [0, 2]; or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is split into the requested number."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds that the processes of a run wait for one another when they start."""

    @property
    def splits_state(self) -> bool:
        """Whether the state is split over devices; then it is split on fewer devices too."""
        return True

    @classmethod
    def list_variants(
        cls, counts: Sequence[int], dims: Set[str]
    ) -> "dict[str, BaseParallelConfig]":
        """Return the values by which `jtrain check` runs this kind, each with its name.

        By default one, over the largest of the `counts` of devices.

        Args:
            counts: numbers of devices that divide the rows, ascending.
        """
        del dims
        kind = cls.__dataclass_fields__["kind"].default
        values: dict[str, Any] = {"devices": counts[-1]}
        return {f"{kind} on {counts[-1]}": cls(**values)}
