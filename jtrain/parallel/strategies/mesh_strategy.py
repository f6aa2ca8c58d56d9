"""Base class of strategies over a mesh of devices."""

import abc
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from jtrain.core.types import Batch, Dims
from jtrain.distributed.compiler_flags import LIBTPU_FLAGS
from jtrain.errors import ShardingError
from jtrain.parallel.mesh import host_order
from jtrain.parallel.offload import host_avals
from jtrain.parallel.rules import ROWS, SPLIT, spec
from jtrain.parallel.strategies.strategy import PlacedBatchCache, Strategy, plain, same_for_all

SCATTER = "xla_tpu_reduce_scatter_collective_matmul_mode"
"""Flag of libtpu 0.0.42.1 and newer; one in LIBTPU_INIT_ARGS has precedence."""


class MeshStrategy(Strategy, abc.ABC):
    """Rows split over the mesh axes of rows, and a replicated state."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._rows = tuple(axis for axis in ROWS if axis in mesh.shape)

    @property
    def shares(self) -> int:
        """Product of the sizes of the axes of rows."""
        return math.prod(self.mesh.shape[axis] for axis in self._rows)

    @property
    def part(self) -> tuple[int, int]:
        """Shard of the rows on the devices of this process, and the number of shards.

        Raises:
            ShardingError: if the rows of the process are not one contiguous shard.
        """
        return self._part

    @functools.cached_property
    def _part(self) -> tuple[int, int]:
        if jax.process_count() == 1:  # the devices may be those of another machine
            return 0, 1
        indices = NamedSharding(self._host_mesh, self.rows(False)).addressable_devices_indices_map
        rows = indices((self.shares,)).values()
        local = sorted({index[0].start or 0 for index in rows if index is not None})
        index, count = local[0] // len(local), self.shares // len(local)
        if local != list(range(index * len(local), (index + 1) * len(local))):
            sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
            raise ShardingError(
                f"{sizes}: process {jax.process_index()} of {jax.process_count()} would have "
                f"shards {local} of the rows, of {self.shares}: not one contiguous shard. Change "
                f"the sizes of stage and slice, or the number of processes."
            )
        return index, count

    @functools.cached_property
    def _host_mesh(self) -> Mesh:
        """The mesh with its devices by host, so that a process has neighbouring rows of a batch."""
        ordered = host_order(list(self.mesh.devices.flat)).reshape(self.mesh.devices.shape)
        return Mesh(ordered, self.mesh.axis_names, axis_types=self.mesh.axis_types)

    @property
    def axes(self) -> Mapping[str, int]:
        """Axes of the mesh."""
        return dict(self.mesh.shape)

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """Scatter gradients over more than 32 devices in rings beside the products, where it pays.

        By default the TPU compiler makes these rings up to 32 devices, and reduces the gradients of
        more devices whole: 31.6 GB of Llama 3 8B over 64 v5p (docs/decisions.md).
        """
        large = self.mesh.shape.get(SPLIT, 1) > 32
        on_tpu = self.mesh.devices.flat[0].platform == "tpu"
        chosen = SCATTER in os.environ.get(LIBTPU_FLAGS, "")
        return {SCATTER: "post_spmd_conservative"} if large and on_tpu and not chosen else {}

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Replicate every leaf."""
        del dims
        return same_for_all(tree, NamedSharding(self.mesh, P()))

    @abc.abstractmethod
    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Return `fn`, written for one replica of the step, as a function of global arrays."""

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
        """Lower `fn` over the mesh, with explicit shardings of arguments and results.

        The compiler would choose other shardings for arrays that `fn` does not use.
        """
        states, everywhere = self._state_shardings(state), NamedSharding(self.mesh, P())
        jitted = jax.jit(
            self.to_global(fn, stacked),
            in_shardings=(states, NamedSharding(self.mesh, self.rows(stacked))),
            out_shardings=(states, everywhere) if returns_state else everywhere,
            donate_argnums=0 if returns_state else (),
            compiler_options=dict(self.compiler_options) or None,
        )
        abstract, rows = plain(state, batch)
        return jitted.lower(host_avals(abstract, states), rows)

    def rows(self, stacked: bool) -> P:
        """Return the spec of the arrays of a batch: b ..., or k b ... for stacked steps."""
        return spec([(), self._rows]) if stacked else spec([self._rows])

    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """Place this process's rows as its shard of the global arrays."""
        return self._places[stacked](batch)

    def _state_shardings(self, state: Any) -> Any:
        has_sharding = lambda leaf: isinstance(getattr(leaf, "sharding", None), NamedSharding)
        if all(has_sharding(leaf) for leaf in jax.tree.leaves(state)):
            return jax.tree.map(lambda leaf: leaf.sharding, state)
        return self.shardings(state)

    @functools.cached_property
    def _places(self) -> tuple[PlacedBatchCache, PlacedBatchCache]:
        return PlacedBatchCache(self._putter(False)), PlacedBatchCache(self._putter(True))

    def _putter(self, stacked: bool):
        sharding = NamedSharding(self.mesh, self.rows(stacked))
        if jax.process_count() == 1:
            if self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu":
                # A program on several CPU devices waits for the step before it.
                return lambda tree: jax.device_put(tree, sharding)
            # The dispatch of a jitted call sends numpy arrays in 15 us; device_put takes 60 us
            # (two arrays, one device).
            return jax.jit(lambda tree: tree, in_shardings=sharding, out_shardings=sharding)
        dim, shards = int(stacked), self.part[1]
        global_shape = lambda x: (*x.shape[:dim], x.shape[dim] * shards, *x.shape[dim + 1 :])
        by_host = NamedSharding(self._host_mesh, self.rows(stacked))
        read = lambda tree: {
            name: jax.make_array_from_process_local_data(by_host, array, global_shape(array))
            for name, array in tree.items()
        }
        if self._host_mesh == self.mesh:
            return read
        return lambda tree: jax.device_put(read(tree), sharding)
