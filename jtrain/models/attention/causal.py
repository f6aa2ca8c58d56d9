"""Causal attention as a value that a decoder hands to its placement."""

import dataclasses

from jaxtyping import Array, Float, Int

from jtrain.models.attention.attention import attention
from jtrain.models.attention.blockwise import ScoreRule, part, part_gradient
from jtrain.parallel.attention.protocol import BlockPositions


@dataclasses.dataclass(frozen=True)
class Causal:
    """Attention of each position to itself and those before; see `attention`."""

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    implementation: str | None = "xla"

    @property
    def kernel(self) -> bool:
        """Use of a kernel, which the compiler cannot split over devices."""
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
        """Return `attention(q, k, v)` with these values; raise as `attention` does."""
        return attention(q, k, v, segments=segments, platform=platform, **dataclasses.asdict(self))

    def part(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        positions: BlockPositions,
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """Attend to some of the keys, as `jtrain.models.attention.blockwise` does; by XLA."""
        return part(self._rule, q, k, v, positions)

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
        """Return what these keys add to the gradients; see `blockwise`."""
        return part_gradient(self._rule, q, k, v, positions, log_sum, dot, cotangent)

    @property
    def _rule(self) -> ScoreRule:
        return ScoreRule(self.window, self.soft_cap, self.scale)
