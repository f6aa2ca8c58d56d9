"""FSDP: the state and the rows of a batch sharded over the same devices."""

from collections.abc import Sequence, Set
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.offload import Offload
from jtrain.parallel.rules import SPLIT
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.parallel.strategies.strategy import BaseParallelConfig, Strategy


@configclass
class FSDP(BaseParallelConfig):
    """Fully sharded data parallel: every large leaf is sharded, and gathered for use.

    Source: ZeRO stage 3, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """

    kind: Literal["fsdp"] = "fsdp"
    devices: Devices = 0
    """Devices of each process: their number, 0 for all; their indices, [0, 2]; or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is split into the requested number."""
    min_size: int = Field(default=4096, ge=0)
    """Smallest number of elements of a leaf that is sharded; smaller ones are replicated."""
    offload: Offload = ()
    """Arrays in the memory of the host between steps, sharded as on the devices: params,
    opt_state, and activations, which a model with remat=names saves for the backward pass."""

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return one that splits even the smallest leaf."""
        del dims
        return {f"fsdp on {counts[-1]} (zero 3)": cls(devices=counts[-1], min_size=0)}

    def build(self, among: Sequence[Device] | None = None) -> Strategy:
        """Build the strategy over these devices, or as many of `among`."""
        selected = devices(self.devices, among)
        return Sharded(
            make_mesh({SPLIT: len(selected)}, selected),
            min_size=self.min_size,
            offload=self.offload,
        )
