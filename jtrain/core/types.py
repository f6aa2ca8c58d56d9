"""The vocabulary: names for the few things that flow through a run, each with its shape."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jtrain.errors import LossError

Leaf: TypeAlias = Any  # an array, or what stands for one: its shape, its sharding
Tree = TypeVar("Tree")  # any pytree, given back with the same structure
Params: TypeAlias = Any  # a pytree of leaves that are differentiated
Extra: TypeAlias = Any  # a pytree of leaves that are not: running statistics, a teacher
Key: TypeAlias = PRNGKeyArray
Keys: TypeAlias = Shaped[Array, "*b"]  # a key, or one for each row (`jtrain.row_keys`)
Batch: TypeAlias = Mapping[str, Any]  # arrays, b ...; always `row` (int32, b) and `mask` (bool, b)
Couples: TypeAlias = Literal["nothing", "batch", "slice"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A sum over rows and its weight, divided only when read: exact under any split of the batch.

    The weight depends on the batch alone, never on the parameters.
    """

    total: Leaf  # f32, any shape; a scalar where it is a loss
    weight: Leaf  # f32, the shape of `total` or a scalar

    @classmethod
    def of(
        cls,
        values: Shaped[Array, "*s"],
        mask: Bool[Array, "*s"],
        weights: Shaped[Array, "*s"] | None = None,
    ) -> "Mean":
        """The mean of `values` where `mask` holds, each counted `weights` times (1 by default).

        Weights may be of either sign: advantages, importance weights. What the mask hides may be
        NaN or infinite.

        Raises:
            LossError: if `mask` or `weights` have fewer dims than `values`, or more numbers.
        """
        _check_belongs(values, mask, "a mask")
        _check_belongs(values, mask if weights is None else weights, "weights")
        weight = mask.astype(jnp.float32)
        if weights is not None:
            weight = jnp.where(mask, weights, 0).astype(jnp.float32)
        seen = jnp.where(mask, values, 0).astype(jnp.float32)
        return cls(_sum(seen * weight), _sum(weight))

    def value(self) -> Any:
        """The mean on the host, float64; NaN where the weight is 0. Waits for the device."""
        total, weight = (np.asarray(x, np.float64) for x in (self.total, self.weight))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / weight
        return float(mean) if mean.ndim == 0 else mean

    def __rmul__(self, coefficient: Leaf) -> "Terms":
        return Terms((self,), (coefficient,))

    def __add__(self, other: "Mean | Terms") -> "Terms":
        return 1.0 * self + other


def _check_belongs(values: Leaf, other: Leaf, called: str) -> None:
    """Checks that NumPy's rules give each of `values` its place in another array, and no more."""
    shape, found = jnp.shape(values), jnp.shape(other)
    fits = len(shape) == len(found) and all(n in (1, m) for m, n in zip(shape, found, strict=True))
    if shape and not fits:
        raise LossError(
            f"a mean of values of shape {shape} was asked for, with {called} of shape {found}. "
            f"Give both one shape: a value a row is `values[:, 0]` or `values.sum(-1)`; where a row"
            f" has several values the mask is `mask[:, None]`."
        )


def _sum(x: Float[Array, "*s"]) -> Float[Array, ""]:
    """The sum, within rows and then over rows.

    XLA:CPU sums 32 x 32 numbers one after the other, which is off by up to 3e-6; kept apart, the
    two stages are off by 4e-7 (weighted rows, the worst of 30 draws).
    """
    if x.ndim < 2:
        return x.sum()
    by_row = x.sum(tuple(range(1, x.ndim)))
    return jax.lax.optimization_barrier(by_row).sum()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """What is minimised: the sum of coefficient x mean, each mean with a weight of its own.

    `cross_entropy + 1e-2 * balance` makes one. A coefficient may be an array, a schedule of the
    step say, and depends on no row.
    """

    means: tuple[Mean, ...]
    coefficients: tuple[Leaf, ...]

    def __rmul__(self, coefficient: Leaf) -> "Terms":
        return Terms(self.means, tuple(coefficient * c for c in self.coefficients))

    def __add__(self, other: "Mean | Terms") -> "Terms":
        other = other if isinstance(other, Terms) else 1.0 * other
        return Terms(self.means + other.means, self.coefficients + other.coefficients)

    def value(self) -> float:
        """Return the sum on the host, float64; a mean of weight 0 adds 0. Waits for the device."""
        means = zip(self.coefficients, self.means, strict=True)
        return float(sum(float(c) * mean.value() for c, mean in means if mean.weight != 0))


Metrics: TypeAlias = dict[str, Mean]
# A plain scalar means "the mean over the rows of this batch", and is refused where rows are masked.
LossValue: TypeAlias = Mean | Terms | Float[Array, ""]
# `(params, batch, rng)`; rng is the step's key, or None where nothing may be drawn: evaluation.
LossFn: TypeAlias = Callable[[Params, Batch, Key | None], LossValue | tuple[LossValue, Metrics]]


@dataclasses.dataclass(frozen=True)
class Stateful:
    """A loss with state: `(params, extra, batch, rng) -> (Mean | Terms, Metrics, extra)`.

    In the `extra` that comes back a leaf that changes is a Mean over the rows (so that it is exact
    under any split), and every other leaf is the one that went in.
    """

    loss: Callable[[Params, Extra, Batch, Key | None], tuple[LossValue, Metrics, Extra]]


def stateful(loss: Callable[..., tuple[LossValue, Metrics, Extra]]) -> Stateful:
    """Marks a loss that takes and returns `extra`."""
    return Stateful(loss)


Dims: TypeAlias = tuple[str | None, ...]  # the names of an array's dims; None where one has none


class Model(NamedTuple):
    """A model of any framework as two pure functions over plain arrays."""

    init: Callable[[Key], tuple[Params, Extra]]
    apply: Callable[..., tuple[Any, Extra]]  # (params, extra, rng, train, *inputs)
    # By parameter, `blocks/0/up/kernel`, if it says.
    dims: Mapping[str, Dims] = MappingProxyType({})
    # What `apply` also takes by name: of `keys` (of the rows), `mask` and the switches of training.
    named: tuple[str, ...] = ()
    # What its layers do to the rows of a batch while it trains; None: not known.
    couples: Couples | None = None

    def __hash__(self) -> int:  # a program is compiled for a model
        return hash((self.init, self.apply))


class Lay(NamedTuple):
    """Where a step puts trees of the structure of the parameters, each function giving its own."""

    params: Callable[[Params], Params]  # the copy of them that is computed with
    each: Callable[[Params], Params]  # the gradient of a microbatch
    summed: Callable[[Params], Params]  # that of the batch


UNLAID = Lay(*[lambda tree: tree] * 3)


@runtime_checkable
class Attention(Protocol):
    """What a model hands to its placement: who sees whom, and who computes it."""

    @property
    def kernel(self) -> bool:
        """Whether it is one that the compiler cannot split over devices."""
        ...

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
        *,
        platform: str | None = None,
    ) -> Float[Array, "b t h k"]:
        """What each query takes from the values it sees; `platform` is what it is compiled for."""
        ...


class Stand(NamedTuple):
    """Where some queries and some keys stand, each a run of positions.

    `ahead`: how many positions the first query comes after the first key; None where no window is
    asked for and all keys come before all queries. `segments`: of the queries and of the keys.
    """

    ahead: Int[Array, ""] | None
    segments: tuple[Int[Array, "b t"], Int[Array, "b s"]] | None


@runtime_checkable
class Parts(Attention, Protocol):
    """Causal attention that can be computed for some keys at a time, and combined."""

    @property
    def window(self) -> int | None:
        """How many positions one sees, its own included; None: all that came before."""
        ...

    def part(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        stand: Stand,
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """The weighted mean of these values, and the log of the sum of the weights."""
        ...

    def part_gradient(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        stand: Stand,
        log_sum: Float[Array, "b t h"],
        along: Float[Array, "b t h"],
        cotangent: Float[Array, "b t h k"],
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """What these keys add to the gradients in q, k and v.

        `log_sum` is that of all keys, `cotangent` that of what they all gave, and `along` the
        product of the two, summed over each head.
        """
        ...


# (one of a stack, x, what belongs to its rows) -> x, and what it gives beside: arrays b ...
Layer: TypeAlias = Callable[[Any, Array, Any], tuple[Array, Any]]


@runtime_checkable
class Placement(Protocol):
    """How a model says what its arrays are, without knowing where they go."""

    @property
    def rows(self) -> int:
        """How many parts the rows of a batch are in."""
        ...

    @property
    def times(self) -> int:
        """How many parts each sequence is in."""
        ...

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x`, laid out by the names of its dims."""
        ...

    def attend(
        self, attention: Attention, q: Array, k: Array, v: Array, segments: Array | None = None
    ) -> Array:
        """`attention(q, k, v, segments)`, b t h k, wherever the parts of t and h are.

        For `Parts` the positions, those of segments too, are in the order of `order`.
        """
        ...

    def order(self, time: int) -> np.ndarray | None:
        """The order of positions, int32 t, in which each device has the same work in attention.

        A decoder takes its tokens in it, and `put_back` undoes it. None: as they are.
        """
        ...

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x`, whose positions are in the order of `order`, in their own."""
        ...

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """The policy of `jax.checkpoint` that saves what has these names (`checkpoint_name`)."""
        ...

    def experts(
        self,
        mix: Callable[..., Array],
        x: Float[Array, "b t d"],
        chosen: Int[Array, "b t n"],
        weights: Float[Array, "b t n"],
        kernels: Sequence[Array],
        dims: Sequence[Dims],
    ) -> Float[Array, "b t d"]:
        """`mix(x, chosen, weights, *kernels)`, wherever the rows and the experts are.

        `kernels` begin with the dim of the experts, and `dims` are the names of theirs. Of choices
        that are no index into the kernels that it gets, `mix` makes zeros.
        """
        ...

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """`x` after every layer of `stack`, whose leaves are l ..., and what each gave: l b ....

        `rows` are arrays b ... that belong to the rows of `x`: a layer gets those of its rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Anywhere:
    """The placement that places nothing."""

    @property
    def rows(self) -> int:
        """One."""
        return 1

    @property
    def times(self) -> int:
        """One."""
        return 1

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x` itself."""
        del dims
        return x

    def attend(
        self, attention: Attention, q: Array, k: Array, v: Array, segments: Array | None = None
    ) -> Array:
        """`attention(q, k, v, segments)` itself."""
        return attention(q, k, v, segments)

    def order(self, time: int) -> np.ndarray | None:
        """None: one device has all the work."""
        del time
        return None

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x` itself."""
        return x

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """Where it was computed."""
        return jax.checkpoint_policies.save_only_these_names(*names)

    def experts(
        self,
        mix: Callable[..., Array],
        x: Float[Array, "b t d"],
        chosen: Int[Array, "b t n"],
        weights: Float[Array, "b t n"],
        kernels: Sequence[Array],
        dims: Sequence[Dims],
    ) -> Float[Array, "b t d"]:
        """`mix` of them all itself."""
        del dims
        return mix(x, chosen, weights, *kernels)

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """One after the other, in a loop."""
        return jax.lax.scan(lambda x, one: layer(one, x, rows), x, stack)


@runtime_checkable
class Batches(Protocol):
    """A batch as a function of the step: nothing to save, nothing to rewind."""

    size: int  # rows a batch, over all processes
    ragged: bool  # whether a mask may hide a row

    def __getitem__(self, step: int, /) -> Batch:
        """The batch of a step, as numpy arrays."""
        ...

    def shard(self, index: int, count: int) -> "Batches":
        """The same batches, of which only the rows of process `index` of `count` are read."""
        ...


@runtime_checkable
class Once(Batches, Protocol):
    """A whole data set once, in order: `len` batches, the last padded under its mask."""

    def __len__(self) -> int: ...
