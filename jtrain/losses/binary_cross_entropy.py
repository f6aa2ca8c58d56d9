"""Binary cross entropy from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.losses.shapes import check_same_shape


def binary_cross_entropy(
    logits: Float[Array, "b *s"],
    labels: Float[Array, "b *s"] | Bool[Array, "b *s"],
    mask: Bool[Array, "b"],
) -> tuple[Mean, Metrics]:
    """Nats a number between sigmoid(logits) and `labels`, over the rows where `mask` holds.

    The metric `accuracy` is how often a logit is above 0 where its label is above 1/2. Labels are
    chances in 0 .. 1, or bools; no `jax.jit` can refuse others, whose loss has no least value.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(logits, labels, mask, ("logits", "labels"))
    seen = jnp.expand_dims(mask, range(1, logits.ndim))
    wide = jnp.where(seen, at_least_f32(logits), 0)  # what a mask hides may be NaN
    wanted = jnp.where(seen, labels.astype(wide.dtype), 0)
    # softplus(z) - y z: exact for large z of either sign.
    values = jax.nn.softplus(wide) - wanted * wide
    numbers = jnp.broadcast_to(seen, wide.shape)
    hits = ((wide > 0) == (wanted > 0.5)).astype(jnp.float32)
    return Mean.of(values, numbers), {"accuracy": Mean.of(hits, numbers)}
