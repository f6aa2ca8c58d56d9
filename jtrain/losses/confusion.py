"""Which class was taken for which."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.losses.shapes import check_labels_shape


def confusion(
    logits: Float[Array, "*b c"], labels: Int[Array, "*b"], mask: Bool[Array, "*b"]
) -> Mean:
    """The matrix of counts (label, likeliest class) over how many there are, where `mask` holds.

    `.total` are the counts, exact up to 2^24 a batch; `.value()` their shares, which add up to 1. A
    label outside 0 .. c-1 is in none of the counts, but in the number that they are divided by.

    Raises:
        LossError: if the shapes do not belong together.
    """
    check_labels_shape(logits, labels, mask)
    classes = jnp.expand_dims(jnp.arange(logits.shape[-1], dtype=labels.dtype), range(mask.ndim))
    true = ((labels[..., None] == classes) & mask[..., None]).astype(jnp.float32)
    taken = logits.argmax(-1).astype(labels.dtype)
    told = (taken[..., None] == classes).astype(jnp.float32)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return Mean(flat(true).T @ flat(told), mask.sum(dtype=jnp.float32))
