"""What every strategy over a mesh of devices shares."""

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from jtrain.core.placement import Placement, Unplaced
from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.types import Batch, Dims, Params
from jtrain.errors import ShardingError
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.offload import host_avals
from jtrain.parallel.rules import ROWS, spec
from jtrain.parallel.strategies.strategy import PlacedBatchCache, StrategyBase, plain, same_for_all


class MeshStrategy(StrategyBase, abc.ABC):
    """Rows are split over the axes of a mesh that are for rows; the state is whole everywhere."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._rows = tuple(axis for axis in ROWS if axis in mesh.shape)

    @property
    def shares(self) -> int:
        """The product of the sizes of those axes."""
        return math.prod(self.mesh.shape[axis] for axis in self._rows)

    @property
    def part(self) -> tuple[int, int]:
        """By the rows that the mesh gives to the devices of this process.

        Raises:
            ShardingError: if they are no even part in one piece.
        """
        return self._part

    @functools.cached_property
    def _part(self) -> tuple[int, int]:
        if jax.process_count() == 1:  # the devices may be none of this machine
            return 0, 1
        where = NamedSharding(self.mesh, self.rows(False)).addressable_devices_indices_map
        rows = where((self.shares,)).values()
        here = sorted({index[0].start or 0 for index in rows if index is not None})
        index, count = here[0] // len(here), self.shares // len(here)
        if here != list(range(index * len(here), (index + 1) * len(here))):
            sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
            raise ShardingError(
                f"{sizes}: process {jax.process_index()} of {jax.process_count()} would have parts "
                f"{here} of the rows, of {self.shares}: no piece that it could read alone. Change "
                f"the sizes of stage and slice, or the number of processes."
            )
        return index, count

    @property
    def axes(self) -> Mapping[str, int]:
        """Those of the mesh."""
        return dict(self.mesh.shape)

    @property
    def placement(self) -> Placement:
        """Nothing to say about the activations."""
        return Unplaced()

    @property
    def psum(self) -> Callable[[Any], Any] | None:
        """The compiler sums."""
        return None

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Whole on every device."""
        del dims
        return same_for_all(tree, NamedSharding(self.mesh, P()))

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Sequence[LeafSharding]:
        """None: all are whole on every device."""
        del tree, dims
        return ()

    def gradient_sharding(self, params: Params, dims: Mapping[str, Dims] = {}, /) -> GradientSharding:
        """Gradients are whole where the parameters are."""
        del params, dims
        return NO_SHARDING

    @abc.abstractmethod
    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """`fn`, written for what one copy of the step sees, over the whole state and batch."""

    def lower(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Lowered:
        """`fn` over the mesh, all that it takes and gives back where this strategy puts it.

        Said and not left to the compiler, which lays out otherwise what `fn` does not use.
        """
        states, everywhere = self._where(state), NamedSharding(self.mesh, P())
        jitted = jax.jit(
            self.whole(fn, stacked),
            in_shardings=(states, NamedSharding(self.mesh, self.rows(stacked))),
            out_shardings=(states, everywhere) if keeps else everywhere,
            donate_argnums=0 if keeps else (),
        )
        abstract, rows = plain(state, batch)
        return jitted.lower(host_avals(abstract, states), rows)

    def rows(self, stacked: bool) -> P:
        """How the arrays of a batch are split: b ..., or k b ... where steps are stacked."""
        return spec([(), self._rows]) if stacked else spec([self._rows])

    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """This process's rows as its part of the global arrays."""
        return self._places[stacked](batch)

    def _where(self, state: Any) -> Any:
        """Where the leaves are said to lie; what does not say goes by the rules."""
        said = lambda leaf: isinstance(getattr(leaf, "sharding", None), NamedSharding)
        if all(said(leaf) for leaf in jax.tree.leaves(state)):
            return jax.tree.map(lambda leaf: leaf.sharding, state)
        return self.shardings(state)

    @functools.cached_property
    def _places(self) -> tuple[PlacedBatchCache, PlacedBatchCache]:
        return PlacedBatchCache(self._putter(False)), PlacedBatchCache(self._putter(True))

    def _putter(self, stacked: bool):
        sharding = NamedSharding(self.mesh, self.rows(stacked))
        if jax.process_count() == 1:
            # Sends numpy arrays through the dispatch of a jitted call: 15 us where device_put
            # takes 60 (two arrays, one device).
            return jax.jit(lambda tree: tree, in_shardings=sharding, out_shardings=sharding)
        dim, parts = int(stacked), self.part[1]
        whole = lambda x: (*x.shape[:dim], x.shape[dim] * parts, *x.shape[dim + 1 :])
        return lambda tree: {
            name: jax.make_array_from_process_local_data(sharding, array, whole(array))
            for name, array in tree.items()
        }
