"""Where activations go, by the names of their dims."""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Shaped

from jtrain.parallel.rules import refuse_uneven, split_named


class ByName:
    """The placement over a mesh: rules for named dims."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, tuple[str, ...]]):
        self._mesh, self._rules, self._sizes = mesh, rules, dict(mesh.shape)

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x`, its named dims split over their axes, the others whole.

        Raises:
            ShardingError: if heads, experts or stages do not divide into whole ones.
        """
        refuse_uneven(x.shape, dims, self._rules, self._sizes)
        spec = split_named(x.shape, dims, self._rules, self._sizes).spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def attend(self, attention: Callable[..., Array], *qkv: Array) -> Array:
        """`attention(q, k, v)`: no dim that it mixes is split."""
        return attention(*qkv)
