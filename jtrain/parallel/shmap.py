"""One copy of the step a device and explicit sums, by `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jtrain.parallel.devices import DATA
from jtrain.parallel.on_mesh import OnMesh
from jtrain.parallel.strategy import compile_once


class ShardMap(OnMesh):
    """Each device runs the step on its rows and adds its sums to the others'."""

    @property
    def psum(self) -> Callable[[Any], Any]:
        """Sums over the devices."""
        return lambda tree: jax.lax.psum(tree, DATA)

    def compile(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Callable:
        """`fn` under `jax.shard_map`; every device comes to the same state."""
        copies = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(P(), self.rows(stacked)),
            out_specs=P(),
            check_vma=False,  # states equal on all devices by construction, not by its types
        )
        return compile_once(jax.jit(copies, donate_argnums=0 if keeps else ()), state, batch)
