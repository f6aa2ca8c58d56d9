"""Attention as a model hands it to its placement, and attention over some of the keys."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int


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


class BlockPositions(NamedTuple):
    """Where some queries and some keys stand, each a run of positions.

    `ahead`: how many positions the first query comes after the first key; None where no window is
    asked for and all keys come before all queries. `segments`: of the queries and of the keys.
    """

    ahead: Int[Array, ""] | None
    segments: tuple[Int[Array, "b t"], Int[Array, "b s"]] | None


@runtime_checkable
class BlockwiseAttention(Attention, Protocol):
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
        stand: BlockPositions,
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """The weighted mean of these values, and the log of the sum of the weights."""
        ...

    def part_gradient(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        stand: BlockPositions,
        log_sum: Float[Array, "b t h"],
        along: Float[Array, "b t h"],
        cotangent: Float[Array, "b t h k"],
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """What these keys add to the gradients in q, k and v.

        `log_sum` is that of all keys, `cotangent` that of what they all gave, and `along` the
        product of the two, summed over each head.
        """
        ...
