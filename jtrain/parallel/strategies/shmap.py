"""Replicas of the step with explicit sums, by `jax.shard_map` and by `jax.pmap`."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jtrain.errors import ShardingError
from jtrain.parallel.devices import DATA
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy


def flat_psum(tree: Any, axis: str) -> Any:
    """Sum each leaf over `axis`, by one message for each dtype, with the bits of `jax.lax.psum`.

    Between processes of CPUs each message costs about as much as a megabyte does, and a tree of
    gradients has hundreds of leaves (benchmarks/flat_psum.py). Where the interconnect is not a
    socket the compiler joins messages itself, and the copy made here gains nothing.
    """
    leaves, structure = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        indices = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        sizes = [leaves[i].size for i in indices]
        total = jax.lax.psum(jnp.concatenate([leaves[i].ravel() for i in indices]), axis)
        parts = jnp.split(total, list(accumulate(sizes))[:-1])
        for i, part in zip(indices, parts, strict=True):
            summed[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, summed)


class ShardMap(MeshStrategy):
    """Replicas of the step, each on its own rows, whose sums are added."""

    @property
    def psum(self) -> Callable[[Any], Any]:
        """Sum over the devices; between processes of CPUs all leaves in one message."""
        sockets = jax.process_count() > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return lambda tree: flat_psum(tree, DATA) if sockets else jax.lax.psum(tree, DATA)

    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Map `fn` by `jax.shard_map`; every device computes the same state."""
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(P(), self.rows(stacked)),
            out_specs=P(),
            check_vma=False,  # states are equal on all devices by construction, not by type
        )


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

    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Map `fn` by `jax.pmap`; every device computes the same state."""
        dim, shares = int(stacked), self.shares

        def split_rows(x: Array) -> Array:  # b ... -> devices b/devices ...
            return x.reshape(*x.shape[:dim], shares, -1, *x.shape[dim + 1 :])

        mapped = jax.pmap(
            fn, DATA, in_axes=(None, dim), out_axes=None, devices=list(self.mesh.devices)
        )
        return lambda state, batch: mapped(state, jax.tree.map(split_rows, batch))
