"""Precision: the type that losses compute in, and the scale that keeps small gradients alive."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.precision.cast import computed_in as computed_in
from jtrain.precision.cast import narrowed as narrowed
from jtrain.precision.kinds import BF16 as BF16
from jtrain.precision.kinds import F16 as F16
from jtrain.precision.kinds import F32 as F32
from jtrain.precision.loss_scale import LossScale as LossScale
from jtrain.precision.loss_scale import Unscaled as Unscaled

Precision: TypeAlias = Annotated[F32 | BF16 | F16, Field(discriminator="kind")]
