"""Named sharding: leaves are split over the mesh by rule; the compiler writes the communication."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from jtrain.parallel.devices import DATA
from jtrain.parallel.on_mesh import OnMesh
from jtrain.types import Placement


class ByName:
    """Dims by name -> mesh axes, for activations."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._axes = {"batch": DATA}

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x`, its named dims split over their axes, the others whole."""
        spec = P(*[self._axes.get(dim) if dim else None for dim in dims])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def attend(self, attention: Callable[..., Array], *qkv: Array) -> Array:
        """`attention(q, k, v)`: no dim that it mixes is split."""
        return attention(*qkv)


class Sharded(OnMesh):
    """One program for all devices. With `split` the state is split too, by the largest dim.

    Leaves of fewer than `min_size` elements stay whole: gathering them costs more than they hold.
    """

    def __init__(self, mesh: Mesh, *, split: bool, min_size: int = 0):
        super().__init__(mesh)
        self._split, self._min_size = split, min_size

    @property
    def placement(self) -> Placement:
        """Activations follow the rows."""
        return ByName(self.mesh)

    def shardings(self, tree: Any, /) -> Any:
        """Each leaf by its largest dim that the devices divide, or whole."""

        def of(leaf: Any) -> NamedSharding:
            whole = not self._split or math.prod(leaf.shape) < self._min_size
            return NamedSharding(
                self.mesh, P() if whole else largest_divisible(leaf.shape, self.shares)
            )

        return jax.tree.map(of, tree)

    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """`fn` itself: there is one copy, and the compiler splits it."""
        del stacked
        return fn


def largest_divisible(shape: tuple[int, ...], shares: int) -> P:
    """The spec that splits the largest dim that `shares` divides; `P()` if there is none."""
    fits = [dim for dim, size in enumerate(shape) if size and size % shares == 0]
    if not fits:
        return P()
    return P(*[None] * max(fits, key=lambda dim: shape[dim]), DATA)
