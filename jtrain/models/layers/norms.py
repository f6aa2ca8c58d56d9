"""LayerNorm and RMSNorm as modules with their parameters."""

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.models.layers.layer_norm import layer_norm
from jtrain.models.layers.rms_norm import rms_norm


class Norm(nnx.Module):
    """LayerNorm with its scale and bias, or RMSNorm with its scale."""

    def __init__(self, width: int, *, kind: Literal["layer", "rms"], epsilon: float, bias: bool):
        self.kind, self.epsilon = kind, epsilon
        # The dim has no mesh axis; its name is there so that a stack of layers can be recognised.
        no_name: Any = {"dims": (None,)}
        self.scale = nnx.Param(jnp.ones(width), **no_name)
        biased = bias and kind == "layer"
        self.bias = nnx.Param(jnp.zeros(width), **no_name) if biased else None

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalise `x` over its last dim."""
        if self.kind == "rms":
            return rms_norm(x, self.scale[...], epsilon=self.epsilon)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, epsilon=self.epsilon)
