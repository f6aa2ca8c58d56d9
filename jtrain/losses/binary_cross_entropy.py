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
    """Return nats a number between sigmoid(logits) and `labels`, over rows where `mask` is true.

    The metric `accuracy` is the share of logits above 0 exactly where the label is above 1/2.
    Labels are probabilities in 0 .. 1, or bools; others cannot be rejected inside `jax.jit`, and
    their loss has no minimum.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(logits, labels, mask, ("logits", "labels"))
    rows = jnp.expand_dims(mask, range(1, logits.ndim))
    wide = jnp.where(rows, at_least_f32(logits), 0)  # masked rows may be NaN
    wanted = jnp.where(rows, labels.astype(wide.dtype), 0)
    # softplus(z) - y z: exact for large z of either sign.
    values = jax.nn.softplus(wide) - wanted * wide
    numbers = jnp.broadcast_to(rows, wide.shape)
    hits = ((wide > 0) == (wanted > 0.5)).astype(jnp.float32)
    return Mean.of(values, numbers), {"accuracy": Mean.of(hits, numbers)}
