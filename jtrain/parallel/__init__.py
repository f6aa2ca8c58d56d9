"""Strategies: where arrays live, and who sums the gradients."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.parallel.devices import Device as Device
from jtrain.parallel.leaf_sharding import LeafSharding as LeafSharding
from jtrain.parallel.memory_estimate import MemoryNeeds as MemoryNeeds
from jtrain.parallel.pipeline.schedule import PipelineSchedule as PipelineSchedule
from jtrain.parallel.strategies.auto import Auto as Auto
from jtrain.parallel.strategies.fsdp import FSDP as FSDP
from jtrain.parallel.strategies.mesh_axes import Axes as Axes
from jtrain.parallel.strategies.mirrored import Mirrored as Mirrored
from jtrain.parallel.strategies.single import Single as Single
from jtrain.parallel.strategies.strategy import Strategy as Strategy
from jtrain.parallel.strategies.strategy import check_divides as check_divides

Layout: TypeAlias = Single | Mirrored | FSDP | Axes
"""How the devices of a run split it, by values that build a strategy."""
Parallel: TypeAlias = Annotated[Layout | Auto, Field(discriminator="kind")]
"""The same, or how it is found."""
