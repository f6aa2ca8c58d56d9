"""Named sharding: arrays are split over a mesh by rules, and the compiler adds communication."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.placement import Placement
from jtrain.core.types import Dims, Params
from jtrain.parallel.attention.sequence_parallel import ContextBy
from jtrain.parallel.axis_usage import AxisUsage, check_axes_used
from jtrain.parallel.leaf_sharding import LeafSharding, StateSharding, Zero
from jtrain.parallel.matrix_sharding import WholeMatrices
from jtrain.parallel.mesh_placement import MeshPlacement
from jtrain.parallel.offload import (
    Offload,
    check_host_memory,
    check_offload_saves,
    is_offloaded,
    offload_shardings,
)
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.rules import activations, copies_of
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy


class Sharded(MeshStrategy):
    """One program for all devices, over the mesh axes of `jtrain.parallel.rules`.

    Args:
        zero: state that is split over the axis `fsdp`; see `StateSharding`.
        min_size: smallest number of elements of a leaf that is split over `fsdp`: gathering a
            smaller leaf costs more than it saves.
        sequence: split activations between blocks in time over the axis `tensor`.
        context_by: exchange of attention between the shards of a sequence, over `context`.
        offload: arrays in the memory of the host between steps; see `jtrain.parallel.offload`.
        schedule: of the pipeline, where the axis `stage` is larger than 1.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        zero: Zero = 3,
        min_size: int = 0,
        sequence: bool = False,
        context_by: ContextBy = "ring",
        offload: Offload = (),
        schedule: PipelineSchedule | None = None,
    ):
        super().__init__(mesh)
        check_host_memory(mesh.devices.flat[0], offload)
        self._offload: Offload = offload
        self._context_by: ContextBy = context_by
        self.schedule = schedule
        self.leaves = StateSharding(dict(mesh.shape), zero, min_size)
        self._usage = AxisUsage()
        self._activations = activations(
            split=zero > 0,
            sequence=sequence,
            copies=copies_of(zero, schedule.gather) if schedule else (),
        )

    @property
    def placement(self) -> Placement:
        """Placement of activations by the names of their dims."""
        more = self._context_by, self._offload, self.schedule
        return MeshPlacement(self.mesh, self._activations, self._usage, *more)

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Return the sharding of each leaf, by the names of its dims and its largest dim."""
        return offload_shardings(self._named(self.leaves.specs(tree, dims)), tree, self._offload)

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> list[LeafSharding]:
        """Return the sharding of each leaf, with the reason."""
        return [
            leaf._replace(host=is_offloaded(leaf.leaf, len(leaf.shape), self._offload))
            for leaf in self.leaves.decisions(tree, dims)
        ]

    def check_axes_used(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Raise unless every axis splits a leaf or an activation."""
        check_offload_saves(self._offload, self._usage.saved)
        check_axes_used(self.axes, self._usage, self.leaves.used.decisions(tree, dims))

    def gradient_sharding(
        self, params: Params, dims: Mapping[str, Dims] = {}, /
    ) -> GradientSharding:
        """Return the sharding of gradients by `zero`: 1 splits their sum, 2 and 3 each gradient."""
        zero = self.leaves.zero

        def constrain(leaves: StateSharding, split: bool) -> Callable[[Params], Params]:
            shardings = self._named(leaves.specs(params, dims, split=split))
            return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)

        split = constrain(self.leaves, True) if zero else NO_SHARDING.summed
        each = split if zero > 1 else NO_SHARDING.each
        specs = self.leaves.specs(params, dims, split=zero > 0)
        is_spec = lambda x: isinstance(x, P)
        return GradientSharding(
            params=constrain(self.leaves.used, zero == 3),
            each=each,
            summed=split,
            matrices=WholeMatrices(self.mesh, self.leaves, dims, split=zero > 0),
            splits=any(axis for x in jax.tree.leaves(specs, is_leaf=is_spec) for axis in x),
        )

    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Return `fn` itself: the compiler splits one program."""
        del stacked
        return fn

    def _named(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
