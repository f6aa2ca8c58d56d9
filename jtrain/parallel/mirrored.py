"""Every device holds the whole state and takes its part of the rows: MirroredStrategy."""

from typing import Literal

from pydantic import Field

from jtrain.parallel.devices import data_mesh
from jtrain.parallel.pmap import Pmap
from jtrain.parallel.sharded import Sharded
from jtrain.parallel.shmap import ShardMap
from jtrain.parallel.strategy import Strategy
from jtrain.values import values


@values
class Mirrored:
    """The state on every device, the rows of a batch split over them."""

    kind: Literal["mirrored"] = "mirrored"
    impl: Literal["jit", "shard_map", "pmap"] = "jit"
    """Who sums the gradients: the compiler (jit), or explicit sums over copies of the step."""
    devices: int = Field(default=0, ge=0)
    """Devices of each process; 0 takes all. A CPU is cut into as many."""

    def build(self) -> Strategy:
        """The strategy over these devices."""
        mesh = data_mesh(self.devices)
        if self.impl == "jit":
            return Sharded(mesh, split=False)
        return ShardMap(mesh) if self.impl == "shard_map" else Pmap(mesh)
