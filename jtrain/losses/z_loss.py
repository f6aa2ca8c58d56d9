"""The z-loss, which keeps logits from drifting."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.losses.shapes import check_mask


def z_loss(logits: Float[Array, "*b c"], mask: Bool[Array, "*b"]) -> Mean:
    """Return the square of the log of the softmax's denominator, where `mask` is true.

    Add the term with a coefficient: `value + 1e-4 * z_loss(logits, mask)`.

    Raises:
        LossError: if the mask has another shape.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5.
    """
    check_mask(mask, logits.shape[:-1])
    wide = jnp.where(mask[..., None], at_least_f32(logits), 0)  # masked rows may be NaN
    return Mean.of(jnp.square(jax.nn.logsumexp(wide, -1)), mask)
