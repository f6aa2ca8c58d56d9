"""Every device holds the whole state and takes its part of the rows: MirroredStrategy."""

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import DATA, Device, devices
from jtrain.parallel.leaf_sharding import Zero
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.offload import Offload
from jtrain.parallel.rules import SPLIT
from jtrain.parallel.strategies.base_config import BaseParallelConfig
from jtrain.parallel.strategies.pmap import Pmap
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.parallel.strategies.shmap import ShardMap
from jtrain.parallel.strategies.strategy import Strategy


@configclass
class Mirrored(BaseParallelConfig):
    """The state on every device, the rows of a batch split over them."""

    kind: Literal["mirrored"] = "mirrored"
    impl: Literal["jit", "shard_map", "pmap"] = "jit"
    """Who sums the gradients: the compiler (jit), or explicit sums over copies of the step."""
    devices: Devices = 0
    """Devices of each process: how many, 0 for all; or which: their indices, [0, 2], or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is cut into as many as are asked for."""
    zero: Zero = 0
    """Of what the devices hold a part each: 1 the optimizer's state, 2 also gradients that are
    summed over microbatches, 3 also the parameters; 0 nothing."""
    offload: Offload = ()
    """What lies in the memory of the host between steps, split as it is on the devices: params,
    opt_state; and activations: what a model with remat=names saves for the backward pass."""

    @model_validator(mode="after")
    def _copies_are_whole(self) -> "Mirrored":
        if self.zero and self.impl != "jit":
            raise ConfigError(
                f"parallel.zero={self.zero} splits the state, and parallel.impl={self.impl} keeps "
                f"a whole copy on each device. Take parallel.impl=jit, or parallel.zero=0."
            )
        if self.offload and self.impl != "jit":
            raise ConfigError(
                f"parallel.offload=[{', '.join(self.offload)}] lays out by name, and "
                f"parallel.impl={self.impl} runs copies of the step. Take parallel.impl=jit, or "
                f"parallel.offload=[]."
            )
        return self

    def build(self, among: Sequence[Device] | None = None) -> Strategy:
        """The strategy over these devices, or as many `among` others."""
        there = devices(self.devices, among)
        mesh = make_mesh({SPLIT if self.zero else DATA: len(there)}, there)
        if self.impl == "jit":
            return Sharded(mesh, zero=self.zero, offload=self.offload)
        return ShardMap(mesh) if self.impl == "shard_map" else Pmap(mesh)
