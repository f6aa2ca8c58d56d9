"""Cross entropy with integer labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.index_marks import in_range
from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def cross_entropy(
    logits: Float[Array, "b c"],
    labels: Int[Array, "b"],
    mask: Bool[Array, "b"],
    *,
    smoothing: float = 0.0,
) -> tuple[Mean, Metrics]:
    """Return nats a row and the accuracy, over the rows where `mask` is true.

    A label must lie in 0 .. c-1. A run, `jt.fit`, `jt.evaluate` and `jt.check_batch` check the
    first batch. Inside `jax.jit` no check is possible: in a later batch a label out of range has
    the loss of the nearest class. A masked label counts for nothing.

    Raises:
        LossError: if `smoothing` is not in 0 .. 1, or the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    hits = (logits.argmax(-1) == labels).astype(jnp.float32)
    return Mean.of(nats(logits, labels, smoothing), mask), {"accuracy": Mean.of(hits, mask)}


def nats(
    logits: Float[Array, "*b c"], labels: Int[Array, "*b"], smoothing: float = 0.0
) -> Float[Array, "*b"]:
    """Return -log softmax(logits) at the labels, in at least float32.

    `smoothing` is the share of each label that is spread evenly over all classes, including the
    label's own; a logit of minus infinity then costs infinity.

    The backward pass is softmax minus one-hot, from the logits and their log-sum-exp: no scatter.
    Only reverse mode: `jax.jvp` and `jax.hessian` raise.

    Raises:
        LossError: if `smoothing` is not in 0 .. 1.

    Source of smoothing: Szegedy et al. 2016, arXiv 1512.00567.
    """
    if not 0 <= smoothing <= 1:
        raise LossError(
            f"smoothing {smoothing} is to be the share of a label that is spread over all classes. "
            f"Give a number in 0 .. 1: smoothing=0.1 is usual, smoothing=0 is none."
        )
    return _nats(logits, in_range(labels, logits, -1), smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _nats(logits, labels, smoothing):
    return _forward(logits, labels, smoothing)[0]


def _forward(logits, labels, smoothing):
    labels = labels.clip(0, logits.shape[-1] - 1)
    wide = at_least_f32(logits)
    log_total = jax.nn.logsumexp(wide, -1)
    at_label = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    if smoothing:
        at_label = (1 - smoothing) * at_label + smoothing * wide.mean(-1)
    return log_total - at_label, (logits, labels, log_total)


def _backward(smoothing, saved, grad):
    logits, labels, log_total = saved
    chances = jnp.exp(at_least_f32(logits) - log_total[..., None])
    classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    target = (jnp.expand_dims(classes, range(labels.ndim)) == labels[..., None]).astype(grad.dtype)
    if smoothing:
        target = (1 - smoothing) * target + smoothing / logits.shape[-1]
    grad = grad[..., None]
    g = jnp.where(grad == 0, 0, (chances - target) * grad)  # masked rows may be NaN
    return g.astype(logits.dtype), np.zeros(labels.shape, jax.dtypes.float0)


_nats.defvjp(_forward, _backward)
