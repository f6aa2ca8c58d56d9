"""Mirrored: a replica of the state on every device, and the rows sharded."""

from collections.abc import Callable, Sequence, Set
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from pydantic import model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError, ShardingError
from jtrain.parallel.devices import DATA, Device, devices
from jtrain.parallel.leaf_sharding import Zero
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.rules import SPLIT
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy
from jtrain.parallel.strategies.sharded import NamedShardingConfig, Sharded
from jtrain.parallel.strategies.strategy import BaseParallelConfig, Strategy


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


class Pmap(ShardMap):
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

    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Map `fn` by `jax.pmap`; every device computes the same state."""
        dim, shares = int(stacked), self.shares

        def split_rows(x: Array) -> Array:  # b ... -> devices b/devices ...
            return x.reshape(*x.shape[:dim], shares, -1, *x.shape[dim + 1 :])

        mapped = jax.pmap(
            fn, DATA, in_axes=(None, dim), out_axes=None, devices=list(self.mesh.devices)
        )
        return lambda state, batch: mapped(state, jax.tree.map(split_rows, batch))


@configclass
class Mirrored(NamedShardingConfig):
    """Replicas of the state on all devices, with the rows of a batch split over the devices."""

    kind: Literal["mirrored"] = "mirrored"
    impl: Literal["jit", "shard_map", "pmap"] = "jit"
    """Reduction of the gradients: by the compiler (jit), or explicit over replicas of the step."""
    zero: Zero = 0
    """State split over the devices: 1 the optimizer's state, 2 also gradients that are summed over
    microbatches, 3 also the parameters; 0 nothing."""

    @model_validator(mode="after")
    def _check_impl(self) -> "Mirrored":
        if self.zero and self.impl != "jit":
            raise ConfigError(
                f"parallel.zero={self.zero} splits the state, and parallel.impl={self.impl} keeps "
                f"a full replica on each device. Take parallel.impl=jit, or parallel.zero=0."
            )
        if self.offload and self.impl != "jit":
            raise ConfigError(
                f"parallel.offload=[{', '.join(self.offload)}] places arrays by name, and "
                f"parallel.impl={self.impl} runs replicas of the step. Take parallel.impl=jit, or "
                f"parallel.offload=[]."
            )
        if self.explicit and self.impl != "jit":
            raise ConfigError(
                f"parallel.explicit=true is of one program for all devices, and parallel.impl="
                f"{self.impl} writes every exchange out already. Take parallel.impl=jit, or leave "
                f"explicit out."
            )
        return self

    @property
    def splits_state(self) -> bool:
        """Whether `zero` splits it."""
        return self.zero > 0

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return each number of devices, and for the largest each `impl` and level of `zero`."""
        del dims
        n = counts[-1]
        return {
            **{f"mirrored on {k}": cls(devices=k) for k in counts},
            f"shard_map on {n}": cls(devices=n, impl="shard_map"),
            f"pmap on {n}": cls(devices=n, impl="pmap"),
            f"zero 1 on {n}": cls(devices=n, zero=1),
            f"zero 2 on {n}": cls(devices=n, zero=2),
        }

    def build(self, among: Sequence[Device] | None = None) -> Strategy:
        """Build the strategy over these devices, or as many of `among`."""
        selected = devices(self.devices, among)
        mesh = make_mesh({SPLIT if self.zero else DATA: len(selected)}, selected)
        if self.impl == "jit":
            return Sharded(mesh, zero=self.zero, offload=self.offload, explicit=self.explicit)
        return ShardMap(mesh) if self.impl == "shard_map" else Pmap(mesh)
