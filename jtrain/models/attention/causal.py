"""Causal attention with its values: what a decoder hands to its placement."""

import dataclasses

from jaxtyping import Array, Float, Int

from jtrain.models.attention.attention import attention
from jtrain.models.attention.blockwise import ScoreRule, part, part_gradient
from jtrain.parallel.attention.protocol import BlockPositions


@dataclasses.dataclass(frozen=True)
class Causal:
    """Attention of each position to itself and what came before; see `attention`."""

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    implementation: str | None = "xla"

    @property
    def kernel(self) -> bool:
        """Whether it is one that the compiler cannot split over devices."""
        return self.implementation not in (None, "xla")

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
        *,
        platform: str | None = None,
    ) -> Float[Array, "b t h k"]:
        """`attention(q, k, v)` with these values; it raises what that raises."""
        return attention(q, k, v, segments=segments, platform=platform, **dataclasses.asdict(self))

    def part(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        stand: BlockPositions,
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """What some keys give, as `jtrain.models.attention.blockwise` says; by XLA."""
        return part(self._sight, q, k, v, stand)

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
        """What those keys add to the gradients, likewise."""
        return part_gradient(self._sight, q, k, v, stand, log_sum, along, cotangent)

    @property
    def _sight(self) -> ScoreRule:
        return ScoreRule(self.window, self.soft_cap, self.scale)
