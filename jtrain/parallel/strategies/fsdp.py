"""The state and the rows of a batch split over the same devices: fully sharded data parallel."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.offload import Offload
from jtrain.parallel.rules import SPLIT
from jtrain.parallel.strategies.base_config import BaseParallelConfig
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.parallel.strategies.strategy import Strategy


@configclass
class FSDP(BaseParallelConfig):
    """Every large leaf split over the devices, gathered where it is used.

    Source: ZeRO stage 3, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """

    kind: Literal["fsdp"] = "fsdp"
    devices: Devices = 0
    """Devices of each process: how many, 0 for all; or which: their indices, [0, 2], or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is cut into as many as are asked for."""
    min_size: int = Field(default=4096, ge=0)
    """Leaves of fewer elements stay whole on every device."""
    offload: Offload = ()
    """What lies in the memory of the host between steps, split as it is on the devices: params,
    opt_state; and activations: what a model with remat=names saves for the backward pass."""

    def build(self, among: Sequence[Device] | None = None) -> Strategy:
        """The strategy over these devices, or as many `among` others."""
        there = devices(self.devices, among)
        return Sharded(
            make_mesh({SPLIT: len(there)}, there), min_size=self.min_size, offload=self.offload
        )
