"""Named sharding: arrays are split over the mesh by rule; the compiler writes the communication."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jtrain.core.placement import Placement
from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.types import Dims, Params
from jtrain.parallel.attention.sequence_parallel import ContextBy
from jtrain.parallel.axis_usage import AxisUsage, check_axes_used
from jtrain.parallel.leaf_sharding import LeafSharding, StateSharding, Zero
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
    """One program for all devices, over the axes of `mesh`: those of `jtrain.parallel.rules`.

    Args:
        zero: what is split over the axis `fsdp`; see `StateSharding`.
        min_size: leaves of fewer elements are not split over it: gathering them costs more than
            they hold.
        sequence: whether activations between blocks are split in time over the axis `tensor`.
        context_by: how attention crosses the parts of a sequence, over the axis `context`.
        offload: what lies in the memory of the host between steps; see `jtrain.parallel.offload`.
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
        self._seen = AxisUsage()
        self._activations = activations(
            split=zero > 0,
            sequence=sequence,
            copies=copies_of(zero, schedule.gather) if schedule else (),
        )

    @property
    def placement(self) -> Placement:
        """Activations by the names of their dims."""
        more = self._context_by, self._offload, self.schedule
        return MeshPlacement(self.mesh, self._activations, self._seen, *more)

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Each leaf by the names of its dims, and by its largest."""
        return offload_shardings(self._named(self.leaves.specs(tree, dims)), tree, self._offload)

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> list[LeafSharding]:
        """Where each leaf goes, and why."""
        return [
            of._replace(host=is_offloaded(of.leaf, len(of.shape), self._offload))
            for of in self.leaves.decisions(tree, dims)
        ]

    def refuse_unused_axes(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Every axis splits a leaf, or did split an activation that the placement was told of."""
        check_offload_saves(self._offload, self._seen.saved)
        check_axes_used(self.axes, self._seen, self.leaves.used.decisions(tree, dims))

    def gradient_sharding(self, params: Params, dims: Mapping[str, Dims] = {}, /) -> GradientSharding:
        """Gradients are split as soon as `zero` reaches them: 1 once summed, 2 and 3 at once."""
        zero = self.leaves.zero

        def to(leaves: StateSharding, split: bool) -> Callable[[Params], Params]:
            where = self._named(leaves.specs(params, dims, split=split))
            return lambda tree: jax.lax.with_sharding_constraint(tree, where)

        split = to(self.leaves, True) if zero else NO_SHARDING.summed
        each = split if zero > 1 else NO_SHARDING.each
        return GradientSharding(to(self.leaves.used, zero == 3), each=each, summed=split)

    def whole(self, fn: Callable, stacked: bool) -> Callable:
        """`fn` itself: there is one copy, and the compiler splits it."""
        del stacked
        return fn

    def _named(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
