"""Protocols of attention: complete attention, and attention over some of the keys."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int


@runtime_checkable
class Attention(Protocol):
    """Attention with its mask and implementation, which a model hands to its placement."""

    @property
    def kernel(self) -> bool:
        """Use of a kernel, which the compiler cannot split over devices."""
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
        """Return the attention of each query; `platform` is that of the compiled program."""
        ...


class BlockPositions(NamedTuple):
    """Positions of some queries and some keys, each a run of positions.

    `ahead`: position of the first query minus that of the first key; None without a window where
    all keys come before all queries. `segments`: of the queries and of the keys.
    """

    ahead: Int[Array, ""] | None
    segments: tuple[Int[Array, "b t"], Int[Array, "b s"]] | None


@runtime_checkable
class BlockwiseAttention(Attention, Protocol):
    """Causal attention that can be computed over some keys at a time, and combined."""

    @property
    def window(self) -> int | None:
        """Positions that a query sees, its own included; None: all before it."""
        ...

    def part(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        positions: BlockPositions,
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """Return the weighted mean of these values, and the log of the sum of the weights."""
        ...

    def part_gradient(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        positions: BlockPositions,
        log_sum: Float[Array, "b t h"],
        dot: Float[Array, "b t h"],
        cotangent: Float[Array, "b t h k"],
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """Return what these keys add to the gradients in q, k and v.

        `log_sum` is that of all keys, `cotangent` the gradient of the output over all keys, and
        `dot` the product of `cotangent` and that output, summed over each head.
        """
        ...
