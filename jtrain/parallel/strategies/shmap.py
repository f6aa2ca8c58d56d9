"""Replicas of the step with explicit sums, by `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jtrain.parallel.devices import DATA
from jtrain.parallel.flat_psum import flat_psum
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy


class ShardMap(MeshStrategy):
    """Replicas of the step, each on its own rows, whose sums are added."""

    @property
    def psum(self) -> Callable[[Any], Any]:
        """Sum over the devices; between processes of CPUs all leaves in one message."""
        sockets = jax.process_count() > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return lambda tree: flat_psum(tree, DATA) if sockets else jax.lax.psum(tree, DATA)

    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """Map `fn` by `jax.shard_map`; every device computes the same state."""
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(P(), self.rows(stacked)),
            out_specs=P(),
            check_vma=False,  # states are equal on all devices by construction, not by type
        )
