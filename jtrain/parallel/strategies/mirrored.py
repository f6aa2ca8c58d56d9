"""Mirrored: a replica of the state on every device, and the rows sharded."""

from collections.abc import Sequence, Set
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
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.parallel.strategies.shmap import Pmap, ShardMap
from jtrain.parallel.strategies.strategy import BaseParallelConfig, Strategy


@configclass
class Mirrored(BaseParallelConfig):
    """Replicas of the state on all devices, with the rows of a batch split over the devices."""

    kind: Literal["mirrored"] = "mirrored"
    impl: Literal["jit", "shard_map", "pmap"] = "jit"
    """Reduction of the gradients: by the compiler (jit), or explicit over replicas of the step."""
    devices: Devices = 0
    """Devices of each process: their number, 0 for all; their indices, [0, 2]; or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is split into the requested number."""
    zero: Zero = 0
    """State split over the devices: 1 the optimizer's state, 2 also gradients that are summed over
    microbatches, 3 also the parameters; 0 nothing."""
    offload: Offload = ()
    """Arrays in the memory of the host between steps, sharded as on the devices: params,
    opt_state, and activations, which a model with remat=names saves for the backward pass."""

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
            return Sharded(mesh, zero=self.zero, offload=self.offload)
        return ShardMap(mesh) if self.impl == "shard_map" else Pmap(mesh)
