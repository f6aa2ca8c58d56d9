"""Losses of regression: squared error, and Huber's error."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_same_shape, spread_weights


def squared_error(
    outputs: Float[Array, "b *s"],
    targets: Float[Array, "b *s"],
    mask: Bool[Array, "b"],
    weights: Shaped[Array, "b *w"] | None = None,
) -> tuple[Mean, Metrics]:
    """Return the mean square of outputs minus targets, over the rows where `mask` is true.

    The metric `absolute_error` is the mean absolute error. Both count a row `weights` times.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(outputs, targets, mask)
    rows = jnp.expand_dims(mask, range(1, outputs.ndim))
    error = jnp.where(rows, at_least_f32(outputs) - at_least_f32(targets), 0)
    counted = jnp.broadcast_to(rows, error.shape)
    row_weights = spread_weights(weights, error.shape)
    value = Mean.of(jnp.square(error), counted, row_weights)
    return value, {"absolute_error": Mean.of(abs(error), counted, row_weights)}


def huber(
    outputs: Float[Array, "b *s"],
    targets: Float[Array, "b *s"],
    mask: Bool[Array, "b"],
    *,
    delta: float = 1.0,
) -> tuple[Mean, Metrics]:
    """Return the mean of error^2 / 2 up to `delta`, and delta x (|error| - delta / 2) beyond.

    The mean is over the numbers of rows where `mask` is true. The metric `absolute_error` is the
    mean absolute error.

    Raises:
        LossError: if `delta` is not positive, or the shapes differ.

    Source: Huber 1964, "Robust estimation of a location parameter".
    """
    if not delta > 0:
        raise LossError(
            f"delta {delta} is not the size of an error. Give a positive number, "
            f"delta=1.0 is usual; squared_error takes squares only."
        )
    check_same_shape(outputs, targets, mask)
    rows = jnp.expand_dims(mask, range(1, outputs.ndim))
    size = abs(jnp.where(rows, at_least_f32(outputs) - at_least_f32(targets), 0))
    near = jnp.minimum(size, delta)
    counted = jnp.broadcast_to(rows, size.shape)
    value = Mean.of(near * (size - near / 2), counted)
    return value, {"absolute_error": Mean.of(size, counted)}
