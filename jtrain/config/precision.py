"""Configs of `precision:`."""

from typing import Annotated, ClassVar, Literal, TypeAlias

import jax.numpy as jnp
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.precision.cast import compute_in as compute_in
from jtrain.core.precision.loss_scale import LossScale, Unscaled


@configclass
class F32:
    """Float32 everywhere, wider only for wider parameters."""

    kind: Literal["f32"] = "f32"
    compute = None
    logits: ClassVar[Literal["float32"]] = "float32"

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
    logits: Literal["float32", "bfloat16"] = "float32"
    """Type in which a language model's logits are stored before the loss; bfloat16 is faster on
    GPUs, and what PyTorch's autocast does."""
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
    logits: ClassVar[Literal["float32"]] = "float32"

    def scale(self) -> LossScale:
        """Return the loss scale before the first step."""
        return LossScale.start(self.initial, growth=self.growth, minimum=self.minimum)


@configclass
class FP8:
    """Linear layers in fp8, e4m3 forward and e5m2 backward; the rest as in `bf16`.

    Nothing is added to the state: every scale is computed from the numbers that it scales. Source:
    Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """

    kind: Literal["fp8"] = "fp8"
    products: tuple[str, ...] = Field(default=("*/kernel",), min_length=1)
    """Patterns of the leaves whose products with activations are computed in fp8: linear layers.
    Embeddings, heads, norms, attention and convolutions stay in bfloat16."""
    exclude: tuple[str, ...] = ()
    """Patterns of leaves that stay in bfloat16 though `products` matches them: layers/2/kernel."""
    scaling: Literal["rows", "tensor"] = "rows"
    """rows: a scale for each row of the activations, so that one row changes no other, and the
    gradients of the weights in bfloat16; tensor: one scale for each array, and all three products
    in fp8, which couples the rows of a batch."""
    logits: Literal["float32", "bfloat16"] = "float32"
    """As in `bf16`."""
    compute = jnp.bfloat16

    def scale(self) -> Unscaled:
        """Return no scale of the loss: each product scales its own factors."""
        return Unscaled()


Precision: TypeAlias = Annotated[F32 | BF16 | F16 | FP8, Field(discriminator="kind")]
