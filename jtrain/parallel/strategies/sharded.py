"""Named sharding: arrays are split over a mesh by rules, and the compiler adds communication."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.loss import Stateful
from jtrain.core.placement import Placement
from jtrain.core.pytree import name
from jtrain.core.types import Dims, Leaf, LossFn, Params
from jtrain.errors import ConfigError
from jtrain.parallel.attention.sequence_parallel import ContextBy
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.explicit import over_explicit_axes
from jtrain.parallel.leaf_sharding import (
    LeafSharding,
    StateSharding,
    WholeMatrices,
    Zero,
    leaf_dims,
)
from jtrain.parallel.mesh import ANY_NUMBER, count_slices, fill_sizes, make_mesh
from jtrain.parallel.mesh_placement import AxisUsage, MeshPlacement, check_axes_used
from jtrain.parallel.offload import (
    Offload,
    check_host_memory,
    check_offload_saves,
    is_offloaded,
    offload_shardings,
)
from jtrain.parallel.pipeline.schedule import Gather, PipelineSchedule, schedule_of
from jtrain.parallel.rules import AXES, SPLIT, activations, axes_of, copies_of
from jtrain.parallel.strategies.mesh_strategy import MeshStrategy
from jtrain.parallel.strategies.strategy import BaseParallelConfig, Strategy


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
        explicit: trace losses over explicit axes; see `jtrain.parallel.explicit`.
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
        explicit: bool = False,
    ):
        super().__init__(mesh)
        check_host_memory(mesh.devices.flat[0], offload)
        self._offload: Offload = offload
        self._context_by: ContextBy = context_by
        self._explicit = explicit
        self.schedule = schedule
        self.state_sharding = StateSharding(dict(mesh.shape), zero, min_size)
        self._usage = AxisUsage()
        self._activations = activations(
            split=zero > 0,
            sequence=sequence,
            copies=copies_of(zero, schedule.gather) if schedule else (),
        )

    @property
    def placement(self) -> Placement:
        """Placement of activations by the names of their dims."""
        return MeshPlacement(
            self.mesh,
            self._activations,
            self._usage,
            self._context_by,
            self._offload,
            self.schedule,
        )

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Return the sharding of each leaf, by the names of its dims and its largest dim."""
        return offload_shardings(
            self._named(self.state_sharding.specs(tree, dims)), tree, self._offload
        )

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> list[LeafSharding]:
        """Return the sharding of each leaf, with the reason."""
        return [
            leaf._replace(host=is_offloaded(leaf.leaf, len(leaf.shape), self._offload))
            for leaf in self.state_sharding.decisions(tree, dims)
        ]

    def check_axes_used(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> None:
        """Raise unless every axis splits a leaf or an activation."""
        check_offload_saves(self._offload, self._usage.saved)
        check_axes_used(self.axes, self._usage, self.state_sharding.used.decisions(tree, dims))

    def loss(self, loss: LossFn | Stateful, dims: Mapping[str, Dims] = {}, /) -> LossFn | Stateful:
        """Return the loss, over explicit axes if they are asked for."""
        if not self._explicit:
            return loss
        used, split = self.state_sharding.used, self.state_sharding.zero == 3

        def is_matrix(path: tuple[Any, ...], x: Leaf) -> bool:
            """Return whether a model names two dims or more, beside that of stacked layers."""
            leaf = name(path)
            named = leaf_dims(leaf, x.ndim, dims) or ()
            stacked = named[:1] == ("layers",)
            chosen = used.choose(leaf, x.shape, dims, split)
            return len(named) - stacked > 1 and not (stacked and axes_of(chosen.spec, 0))

        return over_explicit_axes(
            loss,
            self.mesh,
            self.rows(False),
            lambda weights: used.specs(weights, dims, split=split),
            lambda weights: jax.tree_util.tree_map_with_path(is_matrix, weights),
        )

    def gradient_sharding(
        self, params: Params, dims: Mapping[str, Dims] = {}, /
    ) -> GradientSharding:
        """Return the sharding of gradients by `zero`: 1 splits their sum, 2 and 3 each gradient."""
        zero = self.state_sharding.zero

        def constrain(sharding: StateSharding, split: bool) -> Callable[[Params], Params]:
            shardings = self._named(sharding.specs(params, dims, split=split))
            return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)

        summed = constrain(self.state_sharding, True) if zero else NO_SHARDING.summed
        specs = self.state_sharding.specs(params, dims, split=zero > 0)
        is_spec = lambda x: isinstance(x, P)
        return GradientSharding(
            params=constrain(self.state_sharding.used, zero == 3),
            each=summed if zero > 1 else NO_SHARDING.each,
            summed=summed,
            matrices=WholeMatrices(self.mesh, self.state_sharding, dims, split=zero > 0),
            splits=any(axis for x in jax.tree.leaves(specs, is_leaf=is_spec) for axis in x),
        )

    def to_global(self, fn: Callable, stacked: bool) -> Callable:
        """Return `fn` itself: the compiler splits one program."""
        del stacked
        return fn

    def _named(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


@configclass
class NamedShardingConfig(BaseParallelConfig):
    """Fields of every kind that shards arrays by the names of their dims."""

    offload: Offload = ()
    """Arrays in the memory of the host between steps, sharded as on the devices: params,
    opt_state, and activations, which a model with remat=names saves for the backward pass."""
    explicit: bool = False
    """Trace losses over explicit mesh axes: an operation that would exchange arrays between devices
    without saying so is an error in place of a gather that nobody notices."""


@configclass
class FSDP(NamedShardingConfig):
    """Fully sharded data parallel: every large leaf is sharded, and gathered for use.

    On several TPU slices each slice has all shards, so that only a device's shard of the gradients
    crosses the network between them; over all devices if the state fits in no other way.

    Source: ZeRO stage 3, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """

    kind: Literal["fsdp"] = "fsdp"
    min_size: int = Field(default=4096, ge=0)
    """Smallest number of elements of a leaf that is sharded; smaller ones are replicated."""
    slices: Literal["auto", "replicate", "shard"] = "auto"
    """Several TPU slices. replicate: shard within each slice; shard: over all devices, for a state
    that does not fit in a slice; auto: replicate, if the estimated memory fits."""

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return one that splits even the smallest leaf."""
        del dims
        return {f"fsdp on {counts[-1]} (zero 3)": cls(devices=counts[-1], min_size=0)}

    def build(self, among: Sequence[Device] | None = None) -> Strategy:
        """Build the strategy over these devices, or as many of `among`."""
        selected = devices(self.devices, among)
        # `auto` has become `shard` where the state does not fit (auto.py).
        count = 1 if self.slices == "shard" else count_slices(selected)
        return Sharded(
            make_mesh({"slice": count, SPLIT: len(selected) // count}, selected),
            min_size=self.min_size,
            offload=self.offload,
            explicit=self.explicit,
        )


# Axes that split the model; each needs a parameter with one of these dims.
MODEL_AXES = {
    "tensor": ("heads", "hidden", "vocab"),
    "expert": ("experts",),
    "stage": ("layers",),
    "context": ("heads",),
}


@configclass
class Axes(NamedShardingConfig):
    """A mesh by the sizes of its axes, whose product is the number of devices.

    One size may be 0: the axis takes the remaining devices. `jtrain.parallel.rules` has the dims of
    each axis; `jtrain show CONFIG --sharding` prints the sharding of each leaf.
    """

    kind: Literal["sharded"] = "sharded"
    slice: int = Field(default=1, ge=0)
    """Slices of a TPU, or hosts: groups of devices with slow links between them."""
    stage: int = Field(default=1, ge=0)
    """Stages of a pipeline, each with some of the layers, which must be stacked (the model's
    `scan`)."""
    stage_batches: int = Field(default=0, ge=0)
    """Microbatches that go through the stages one after the other; 0: as many as stages. More
    microbatches mean less idle time, and more saved activations."""
    repeats: int = Field(default=1, ge=1)
    """Rounds of a microbatch through the stages, each of which has as many runs of layers; idle
    time is divided by the rounds."""
    gather: Gather = "turn"
    """Gathering of the weights that `zero` splits, and scattering of their gradients, in a
    pipeline: turn, in each turn; step, once a step, with full weights and gradients in between."""
    data: int = Field(default=1, ge=0)
    """Replicas of the state, each with a shard of the rows."""
    fsdp: int = Field(default=0, ge=0)
    """Shards of the rows whose devices also split the state, by `zero`."""
    expert: int = Field(default=1, ge=0)
    """Shards of the rows whose devices have different experts."""
    context: int = Field(default=1, ge=0)
    """Shards of each sequence; `context_by` is the exchange of attention between them."""
    tensor: int = Field(default=1, ge=0)
    """Shards of heads, of MLPs and of the vocabulary."""
    zero: Zero = 3
    """State split over `fsdp`: 1 the optimizer's state, 2 also gradients that are summed over
    microbatches, 3 also the parameters; 0 nothing."""
    sequence: bool = True
    """Split activations between blocks in time over `tensor`, if it divides the time. Otherwise
    each device saves all positions for the backward pass, and sends less."""
    context_by: ContextBy = "ring"
    """ring: keys and values are sent around, for any number of heads; ulysses: devices exchange
    time for complete heads, and any kernel computes attention."""
    min_size: int = Field(default=4096, ge=0)
    """Smallest number of elements of a leaf that is split over `fsdp`."""

    @model_validator(mode="after")
    def _check_explicit(self) -> "Axes":
        if self.explicit and self.stage != 1:
            raise ConfigError(
                f"parallel.explicit=true gives each array its split, and parallel.stage="
                f"{self.stage} computes all stages of a pipeline in one array. Take "
                f"parallel.stage=1 (parallel.fsdp splits the state too), or leave explicit out."
            )
        return self

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return a size of 2 for each axis for which a parameter has a dim."""
        n = counts[-1]
        axes = [axis for axis, needed in MODEL_AXES.items() if dims & set(needed)]
        sizes: dict[str, Any] = {"devices": n, "min_size": 0, "data": n // 2, "fsdp": 1}
        return {f"{axis} 2, data {n // 2}": cls(**{**sizes, axis: 2}) for axis in axes}

    def build(self, among: Sequence[Device] | None = None) -> Sharded:
        """Build the strategy over these devices, or as many of `among`.

        Raises:
            ConfigError: if the axes do not multiply to the number of devices, or the values of the
                pipeline do not match its stages.
            ShardingError: if `offload` is set and the devices cannot access the host's memory.
        """
        selected = devices(self.devices, among, instead=ANY_NUMBER)
        sizes = fill_sizes({axis: getattr(self, axis) for axis in AXES}, len(selected))
        return Sharded(
            make_mesh(sizes, selected),
            zero=self.zero,
            min_size=self.min_size,
            sequence=self.sequence,
            schedule=schedule_of(sizes["stage"], self.stage_batches, self.repeats, self.gather),
            context_by=self.context_by,
            offload=self.offload,
            explicit=self.explicit,
        )
