"""A size for each axis: every way to split a model that one program of named shardings has."""

from collections.abc import Sequence
from typing import Literal

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
from jtrain.parallel.strategies.base_config import BaseParallelConfig
from jtrain.parallel.strategies.sharded import Sharded


@configclass
class Axes(BaseParallelConfig):
    """A mesh by the sizes of its axes; they multiply to the number of devices.

    One of them may be 0: it is what the others leave. Which dims an axis splits says
    `jtrain.parallel.rules`; `jtrain show CONFIG --sharding` prints what became of each leaf.
    """

    kind: Literal["sharded"] = "sharded"
    devices: Devices = 0
    """Devices of each process: how many, 0 for all; or which: their indices, [0, 2], or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is cut into as many as are asked for."""
    slice: int = Field(default=1, ge=0)
    """Slices of a TPU, or hosts: groups of devices with slow links between them."""
    stage: int = Field(default=1, ge=0)
    """Stages of a pipeline: each has some of the layers, which it takes to be stacked (the model's
    `scan`)."""
    stage_batches: int = Field(default=0, ge=0)
    """Microbatches that go through the stages one after the other; 0: as many as stages. The more,
    the less time stages are idle, and the more there is to keep until the way back."""
    repeats: int = Field(default=1, ge=1)
    """Times that a microbatch goes round the stages, each of which then has so many runs of layers,
    apart from one another: as much less idle time."""
    gather: Gather = "turn"
    """When a pipeline gathers the weights that `zero` splits and scatters their gradients: turn, as
    they are used, each turn anew; step, once in a step, and both are whole until it ends."""
    data: int = Field(default=1, ge=0)
    """Copies of the state, each with its part of the rows."""
    fsdp: int = Field(default=0, ge=0)
    """Parts of the rows whose devices split the state, as `zero` says."""
    expert: int = Field(default=1, ge=0)
    """Parts of the rows whose devices have different experts."""
    context: int = Field(default=1, ge=0)
    """Parts of each sequence; `context_by` says how attention crosses them."""
    tensor: int = Field(default=1, ge=0)
    """Parts of heads, of MLPs and of the vocabulary."""
    zero: Zero = 3
    """Of what is split over `fsdp`: 1 the optimizer's state, 2 also gradients that are summed over
    microbatches, 3 also the parameters; 0 nothing."""
    sequence: bool = True
    """Whether activations between blocks are split in time over `tensor`, where it divides the
    time. Without it each device keeps all positions for the backward pass, and sends less."""
    context_by: ContextBy = "ring"
    """ring: keys and values travel around, with whatever number of heads; ulysses: devices exchange
    time for heads, whole ones, and any kernel computes attention."""
    min_size: int = Field(default=4096, ge=0)
    """Leaves of fewer elements are not split over `fsdp`."""
    offload: Offload = ()
    """What lies in the memory of the host between steps, split as it is on the devices: params,
    opt_state; and activations: what a model with remat=names saves for the backward pass."""

    def build(self, among: Sequence[Device] | None = None) -> Sharded:
        """The strategy over these devices, or as many `among` others.

        Raises:
            ConfigError: if the axes do not multiply to the number of devices, or the values of the
                pipeline do not fit its stages.
            ShardingError: if it offloads and the devices reach no memory of the host.
        """
        there = devices(self.devices, among, instead=ANY_NUMBER)
        sizes = fill_sizes({axis: getattr(self, axis) for axis in AXES}, len(there))
        return Sharded(
            make_mesh(sizes, there),
            zero=self.zero,
            min_size=self.min_size,
            sequence=self.sequence,
            schedule=schedule_of(sizes["stage"], self.stage_batches, self.repeats, self.gather),
            context_by=self.context_by,
            offload=self.offload,
        )
