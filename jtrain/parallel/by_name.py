"""Where activations go, by the names of their dims."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from jtrain.parallel.attending import CONTEXT, Attending, ContextBy
from jtrain.parallel.rules import refuse_uneven, split_named
from jtrain.types import Attention


class ByName:
    """The placement over a mesh: rules for named dims."""

    def __init__(
        self, mesh: Mesh, rules: Mapping[str, tuple[str, ...]], context_by: ContextBy = "ring"
    ):
        self._mesh, self._rules, self._sizes = mesh, rules, dict(mesh.shape)
        self._attending = Attending(mesh, rules, context_by)

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x`, its named dims split over their axes, the others whole.

        Raises:
            ShardingError: if heads, experts or stages do not divide into whole ones.
        """
        refuse_uneven(x.shape, dims, self._rules, self._sizes)
        spec = split_named(x.shape, dims, self._rules, self._sizes).spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def attend(
        self,
        attention: Attention,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """`attention(q, k, v, segments)`; how, and what it raises: `jtrain.parallel.attending`."""
        return self._attending.attend(attention, q, k, v, segments)

    def look_up(
        self, table: Float[Array, "v d"], tokens: Int[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        """`table[tokens]`.

        Where both rows and time are split, the width of the table is gathered first: from a part
        of the width of all positions to all of the width of some of them, the compiler of jax 0.12
        finds no way but to replicate both.
        """
        if self._sizes.get(CONTEXT, 1) > 1:
            table = self.constrain(table, "vocab", None)
        return table[tokens]

    def order(self, time: int) -> np.ndarray | None:
        """The order of positions in which the devices of `context` have the same work."""
        return self._attending.order(time)

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x`, whose positions are in that order, in their own."""
        return self._attending.put_back(x)
