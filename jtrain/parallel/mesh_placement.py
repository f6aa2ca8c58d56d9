"""Placement of activations over a mesh, by the names of their dims."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Layer, Unplaced
from jtrain.core.types import Dims, Params
from jtrain.parallel.attention.protocol import Attention
from jtrain.parallel.attention.sequence_parallel import ContextBy, SequenceParallelAttention
from jtrain.parallel.axis_usage import AxisUsage
from jtrain.parallel.expert_exchange import exchange_experts
from jtrain.parallel.offload import Offload, remat_policy
from jtrain.parallel.pipeline.pipeline import through_stages
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.pipeline.stages import RowSplit
from jtrain.parallel.rules import ROWS, split_evenly


class MeshPlacement:
    """The placement over a mesh: rules for named dims."""

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, tuple[str, ...]],
        usage: AxisUsage,
        context_by: ContextBy = "ring",
        offload: Offload = (),
        schedule: PipelineSchedule | None = None,
    ):
        self._mesh, self._rules, self._sizes = mesh, rules, dict(mesh.shape)
        repeats = schedule.repeats if schedule else 1
        self._attention = SequenceParallelAttention(mesh, rules, context_by, repeats=repeats)
        self._usage, self._offload, self._schedule = usage, offload, schedule

    @property
    def rows(self) -> int:
        """The product of the sizes of the axes that rows are split over."""
        return math.prod(self._sizes.get(axis, 1) for axis in ROWS)

    @property
    def times(self) -> int:
        """The size of `context`."""
        return self._sizes.get("context", 1)

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """Constrain `x`: named dims are split over their axes, other dims unsharded.

        Raises:
            ShardingError: if an axis does not divide heads, experts or stages.
        """
        choice = split_evenly(x.shape, dims, self._rules, self._sizes)
        self._usage.note(choice, dims)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, choice.spec))

    def attend(
        self,
        attention: Attention,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """Return `attention(q, k, v, segments)`; see `SequenceParallelAttention`."""
        return self._attention.attend(attention, q, k, v, segments)

    def order(self, time: int) -> np.ndarray | None:
        """Return the order of positions with equal work on the devices of `context`."""
        return self._attention.order(time)

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return `x` with its positions in their original order."""
        return self._attention.put_back(x)

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return the policy that saves these names on the device or in the memory of the host."""
        self._usage.saved.extend(names)
        return remat_policy(names, self._offload)

    def experts(
        self,
        mix: Callable[..., Array],
        x: Float[Array, "b t d"],
        chosen: Int[Array, "b t n"],
        weights: Float[Array, "b t n"],
        kernels: Sequence[Array],
        dims: Sequence[Dims],
    ) -> Float[Array, "b t d"]:
        """Apply `mix` on each device to the tokens of its `expert` axis and its own experts."""
        copies = self._rules["copies"] if self._schedule else ()
        return exchange_experts(self._mesh, mix, x, chosen, weights, kernels, dims, copies)

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Apply layers in a loop, or in the stages of a pipeline: `parallel.pipeline`."""
        if self._schedule is None:
            return Unplaced().layers(layer, stack, x, rows)
        axes = tuple(axis for axis in self._rules["copies"] if axis in self._sizes)
        copies = math.prod(self._sizes[axis] for axis in axes)
        split = RowSplit(copies, self.rows // self._schedule.stages // copies, axes, self._mesh)
        return through_stages(self._schedule, self.constrain, layer, stack, x, rows, split)
