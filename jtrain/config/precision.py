"""Configs of `precision:`."""

from typing import Annotated, Literal, TypeAlias

import jax.numpy as jnp
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.precision.loss_scale import LossScale, Unscaled


@configclass
class F32:
    """Float32 everywhere, wider only for wider parameters."""

    kind: Literal["f32"] = "f32"
    compute = None

    def scale(self) -> Unscaled:
        """Return no scale."""
        return Unscaled()


@configclass
class BF16:
    """Bfloat16 loss; parameters, sums of gradients and the optimizer in float32.

    bfloat16 has the range of float32, so nothing is scaled. Source: Kalamkar et al. 2019,
    https://arxiv.org/abs/1905.12322.
    """

    kind: Literal["bf16"] = "bf16"
    compute = jnp.bfloat16

    def scale(self) -> Unscaled:
        """Return no scale: bfloat16 has the exponents of float32."""
        return Unscaled()


@configclass
class F16:
    """Float16 loss, scaled so that small gradients do not vanish; the rest in float32.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2; the constants
    are those of TensorFlow's LossScaleOptimizer.
    """

    kind: Literal["f16"] = "f16"
    initial: float = Field(default=2.0**15, gt=0)
    """The factor on the loss at the first step; a power of two rounds nothing."""
    growth: int = Field(default=2000, gt=0)
    """Good steps after which the factor doubles; a gradient that overflows halves it, and the step
    is skipped."""
    minimum: float = Field(default=1.0, gt=0)
    """The factor is not halved below this; an overflow there ends the run."""
    compute = jnp.float16

    def scale(self) -> LossScale:
        """Return the loss scale before the first step."""
        return LossScale.start(self.initial, growth=self.growth, minimum=self.minimum)


Precision: TypeAlias = Annotated[F32 | BF16 | F16, Field(discriminator="kind")]
