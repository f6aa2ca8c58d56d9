"""Placement of activations over a mesh, by the names of their dims, and the usage of its axes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Layer, Unplaced
from jtrain.core.types import Dims, Params
from jtrain.errors import ShardingError
from jtrain.parallel.attention.sequence_parallel import ContextBy, SequenceParallelAttention
from jtrain.parallel.expert_exchange import exchange_experts
from jtrain.parallel.explicit import by_compiler, constrained, keeps_split
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.offload import Offload, remat_policy
from jtrain.parallel.pipeline.pipeline import through_stages
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.pipeline.stages import RowSplit
from jtrain.parallel.rules import ROWS, STATE, DimSplit, Sizes, axes_of, split_evenly

# Dims of any model, which do not count as usage of an axis.
OF_ROWS = ("rows", "batch", "group", "copies")
# Axes that split a dim only together with another axis, which does not count as usage.
BESIDE = {"time": {"tensor"}}
# Models with a dim for each axis. The other axes split the rows, which every run has.
NEEDS = {
    "stage": "a model whose layers are stacked (model.scan=true of a transformer)",
    "expert": "a model with experts (model.experts of a transformer)",
    "context": "a model that names the dim `time` of what it computes, such as a transformer",
    "tensor": "a model that names heads, hidden or vocab, such as a transformer",
}


class AxisUsage:
    """Record of split and unsplit activations since a loss was traced."""

    def __init__(self):
        self.axes: set[str] = set()
        self.saved: list[str] = []  # names of saved activations
        self.left: dict[str, None] = {}  # reasons why dims are unsharded, in order

    def note(self, choice: DimSplit, dims: Dims) -> None:
        """Record the split of an activation."""
        for dim, name in enumerate(dims):
            if name not in OF_ROWS:
                beside = BESIDE.get(name or "", set())
                self.axes.update(axis for axis in axes_of(choice.spec, dim) if axis not in beside)
        self.left.update(dict.fromkeys(choice.left))


def check_axes_used(sizes: Sizes, usage: AxisUsage, leaves: Iterable[LeafSharding]) -> None:
    """Raise unless every axis splits a leaf or a recorded activation.

    Raises:
        ShardingError: with the unused axis, why dims are unsharded, and the settings to change.
    """
    used, left = set(usage.axes), dict(usage.left)
    for leaf in leaves:
        used.update(axis for axes in leaf.axes for axis in axes)
        left.update(dict.fromkeys(leaf.choice.left))
    for axis, needs in NEEDS.items():
        size = sizes.get(axis, 1)
        if size == 1 or axis in used:
            continue
        names = [name for name, axes in STATE.items() if axis in axes] or ["time"]
        reasons = [why for why in left if f" multiple of {axis} " in why][:3]
        why = "; ".join(reasons) if reasons else f"no dim is named {' or '.join(names)}"
        raise ShardingError(
            f"parallel.{axis}={size}, and no dim can use that axis: {why}. "
            f"Take parallel.{axis}=1 and give its devices to the rows (parallel.fsdp=0), or take "
            f"{needs}."
        )


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
        attention = SequenceParallelAttention(mesh, rules, context_by, repeats=repeats)
        self.attend, self.order = attention.attend, attention.order
        self.put_back = keeps_split(attention.put_back, 2)
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
        return constrained(x, self._mesh, choice.spec)

    def sums(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """Return `fn(*arrays)`, inside of which the compiler places arrays."""
        return by_compiler(fn, P(), *arrays)

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

        def exchange(x: Array, chosen: Array, weights: Array, kernels: Sequence[Array]) -> Array:
            return exchange_experts(self._mesh, mix, x, chosen, weights, kernels, dims, copies)

        return keeps_split(exchange, 2)(x, chosen, weights, kernels)

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
