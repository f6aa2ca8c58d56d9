"""Squared error."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.losses.shapes import check_same_shape


def squared_error(
    outputs: Float[Array, "b *s"], targets: Float[Array, "b *s"], mask: Bool[Array, "b"]
) -> tuple[Mean, Metrics]:
    """Return the mean square of outputs minus targets, over the rows where `mask` is true.

    The metric `absolute_error` is the mean absolute error.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(outputs, targets, mask)
    rows = jnp.expand_dims(mask, range(1, outputs.ndim))
    error = jnp.where(rows, at_least_f32(outputs) - at_least_f32(targets), 0)
    numbers = jnp.broadcast_to(rows, error.shape)
    return Mean.of(jnp.square(error), numbers), {"absolute_error": Mean.of(abs(error), numbers)}
