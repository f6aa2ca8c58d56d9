"""Accuracy: the share of labels among the likeliest classes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def accuracy(
    logits: Float[Array, "*b c"], labels: Int[Array, "*b"], mask: Bool[Array, "*b"], *, top: int = 1
) -> Mean:
    """Return the share of labels among the `top` greatest logits, where `mask` is true.

    Of equal logits the first wins, as in `argmax`. A label outside 0 .. c-1 is a miss.

    Raises:
        LossError: if `top` is not in 1 .. c, or the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    classes = logits.shape[-1]
    if not 1 <= top <= classes:
        raise LossError(
            f"accuracy among the first {top} of {classes} classes: give top in 1 .. {classes} "
            f"(top={min(max(top, 1), classes)})."
        )
    if top == 1:
        return Mean.of((logits.argmax(-1) == labels).astype(jnp.float32), mask)
    known = (labels >= 0) & (labels < classes)
    own = jnp.take_along_axis(logits, labels.clip(0, classes - 1)[..., None], -1)
    index = jnp.expand_dims(jnp.arange(classes, dtype=labels.dtype), range(labels.ndim))
    ahead = (logits > own) | ((logits == own) & (index < labels[..., None]))
    hits = known & (ahead.sum(-1) < top)
    return Mean.of(hits.astype(jnp.float32), mask)
