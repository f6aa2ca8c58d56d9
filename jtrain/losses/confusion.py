"""Confusion matrix of a classifier."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.losses.shapes import check_labels_shape


def confusion(
    logits: Float[Array, "*b c"], labels: Int[Array, "*b"], mask: Bool[Array, "*b"]
) -> Mean:
    """Return the shares (label, likeliest class) of the rows where `mask` is true.

    `.total` are the counts, exact up to 2^24 a batch; `.value()` their shares, which add up to 1. A
    label outside 0 .. c-1 is in no count, but in the number of rows.

    Raises:
        LossError: if the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    classes = jnp.expand_dims(jnp.arange(logits.shape[-1], dtype=labels.dtype), range(mask.ndim))
    true = ((labels[..., None] == classes) & mask[..., None]).astype(jnp.float32)
    predicted = logits.argmax(-1).astype(labels.dtype)
    one_hot = (predicted[..., None] == classes).astype(jnp.float32)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return Mean(flat(true).T @ flat(one_hot), mask.sum(dtype=jnp.float32))
