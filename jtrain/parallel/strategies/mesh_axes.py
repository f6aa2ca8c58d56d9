"""Layouts by the size of each mesh axis."""

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.parallel.attention.sequence_parallel import ContextBy
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.leaf_sharding import Zero
from jtrain.parallel.mesh import ANY_NUMBER, fill_sizes, make_mesh
from jtrain.parallel.offload import Offload
from jtrain.parallel.pipeline.schedule import Gather, schedule_of
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.parallel.strategies.strategy import BaseParallelConfig

# Axes that split the model; each needs a parameter with one of these dims.
MODEL_AXES = {
    "tensor": ("heads", "hidden", "vocab"),
    "expert": ("experts",),
    "stage": ("layers",),
    "context": ("heads",),
}


@configclass
class Axes(BaseParallelConfig):
    """A mesh by the sizes of its axes, whose product is the number of devices.

    One size may be 0: the axis takes the remaining devices. `jtrain.parallel.rules` has the dims of
    each axis; `jtrain show CONFIG --sharding` prints the sharding of each leaf.
    """

    kind: Literal["sharded"] = "sharded"
    devices: Devices = 0
    """Devices of each process: their number, 0 for all; their indices, [0, 2]; or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is split into the requested number."""
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
    offload: Offload = ()
    """Arrays in the memory of the host between steps, sharded as on the devices: params,
    opt_state, and activations, which a model with remat=names saves for the backward pass."""

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return a size of 2 for each axis for which a parameter has a dim."""
        n = counts[-1]
        axes = [axis for axis, needed in MODEL_AXES.items() if dims & set(needed)]
        size: Callable[[str], dict[str, Any]] = lambda axis: {axis: 2, "data": n // 2, "fsdp": 1}
        return {
            f"{axis} 2, data {n // 2}": cls(devices=n, min_size=0, **size(axis)) for axis in axes
        }

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
        )
