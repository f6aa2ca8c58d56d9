"""One copy of the step a device and explicit sums, by `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jtrain.parallel.devices import DATA
from jtrain.parallel.flat_psum import flat_psum
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy


class ShardMap(MeshStrategy):
    """Each device runs the step on its rows and adds its sums to the others'."""

    @property
    def psum(self) -> Callable[[Any], Any]:
        """Sums over the devices; between processes of CPUs all leaves in one message."""
        sockets = jax.process_count() > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return lambda tree: flat_psum(tree, DATA) if sockets else jax.lax.psum(tree, DATA)

    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """`fn` under `jax.shard_map`; every device comes to the same state."""
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(P(), self.rows(stacked)),
            out_specs=P(),
            check_vma=False,  # states equal on all devices by construction, not by its types
        )
