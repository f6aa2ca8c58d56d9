"""Strategies: placement of arrays on devices, and reduction of gradients."""

from typing import Annotated, TypeAlias

from jtrain.config.registry import Registry
from jtrain.io.lazy_names import lazy_names
from jtrain.parallel.custom_loop import gather as gather
from jtrain.parallel.custom_loop import reduce as reduce
from jtrain.parallel.custom_loop import run_per_device as run_per_device
from jtrain.parallel.devices import Device as Device
from jtrain.parallel.leaf_sharding import LeafSharding as LeafSharding
from jtrain.parallel.pipeline.schedule import PipelineSchedule as PipelineSchedule
from jtrain.parallel.strategies.auto import Auto as Auto
from jtrain.parallel.strategies.auto import MemoryNeeds as MemoryNeeds
from jtrain.parallel.strategies.mirrored import Mirrored as Mirrored
from jtrain.parallel.strategies.server import Server as Server
from jtrain.parallel.strategies.sharded import FSDP as FSDP
from jtrain.parallel.strategies.sharded import Axes as Axes
from jtrain.parallel.strategies.single import Single as Single
from jtrain.parallel.strategies.strategy import BaseParallelConfig as BaseParallelConfig
from jtrain.parallel.strategies.strategy import Strategy as Strategy
from jtrain.parallel.strategies.strategy import check_divides as check_divides

Layout: TypeAlias = Single | Mirrored | FSDP | Axes | Server
"""Configs that build a strategy: how a run is split over its devices."""
Parallel: TypeAlias = Annotated[Layout | Auto, Registry("strategies", BaseParallelConfig, "build")]
"""A layout, or the automatic choice of one."""

_, __dir__ = lazy_names(__name__)
