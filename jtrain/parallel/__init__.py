"""Strategies: where arrays live, and who sums the gradients."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.parallel.auto import Auto as Auto
from jtrain.parallel.axes import Axes as Axes
from jtrain.parallel.devices import Device as Device
from jtrain.parallel.estimate import Needs as Needs
from jtrain.parallel.fsdp import FSDP as FSDP
from jtrain.parallel.leaves import Decision as Decision
from jtrain.parallel.mirrored import Mirrored as Mirrored
from jtrain.parallel.schedule import Schedule as Schedule
from jtrain.parallel.single import Single as Single
from jtrain.parallel.strategy import Strategy as Strategy
from jtrain.parallel.strategy import check_divides as check_divides

Layout: TypeAlias = Single | Mirrored | FSDP | Axes
"""How the devices of a run split it, by values that build a strategy."""
Parallel: TypeAlias = Annotated[Layout | Auto, Field(discriminator="kind")]
"""The same, or how it is found."""
