"""Replicas of the step with explicit sums, by `jax.pmap`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from jtrain.errors import ShardingError
from jtrain.parallel.devices import DATA
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy


class Pmap(MeshStrategy):
    """Replicas of the step by the older transformation; for one process.

    For users who come from `pmap`, which since JAX 0.8 is itself written with `jit` and
    `shard_map`.
    """

    def __init__(self, mesh: Mesh):
        if jax.process_count() > 1:
            raise ShardingError(
                "parallel.impl=pmap runs in one process, and this run has "
                f"{jax.process_count()}. Take parallel.impl=shard_map: the same replicas and sums."
            )
        super().__init__(mesh)

    @property
    def psum(self) -> Callable[[Any], Any]:
        """Sum over the devices."""
        return lambda tree: jax.lax.psum(tree, DATA)

    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """Map `fn` by `jax.pmap`; every device computes the same state."""
        dim, shares = int(stacked), self.shares

        def by_device(x: Array) -> Array:  # b ... -> devices b/devices ...
            return x.reshape(*x.shape[:dim], shares, -1, *x.shape[dim + 1 :])

        mapped = jax.pmap(
            fn, DATA, in_axes=(None, dim), out_axes=None, devices=list(self.mesh.devices)
        )
        return lambda state, batch: mapped(state, jax.tree.map(by_device, batch))
