"""Cross entropy."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits, labels):
    """Return -log softmax(logits) at the labels, in float32; its gradient is softmax - one-hot."""
    return cross_entropy_forward(logits, labels)[0]


def cross_entropy_forward(logits, labels):
    """Save the logits and the log of their sum of exponentials."""
    labels = labels.clip(0, logits.shape[-1] - 1)
    wide = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(wide, -1)
    at_label = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return log_total - at_label, (logits, labels, log_total)


def cross_entropy_backward(saved, grad):
    """Return the gradient in the logits."""
    logits, labels, log_total = saved
    chances = jnp.exp(logits.astype(jnp.float32) - log_total[..., None])
    classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    target = jnp.expand_dims(classes, range(labels.ndim)) == labels[..., None]
    grad = grad[..., None]
    slopes = jnp.where(grad == 0, 0, (chances - target.astype(grad.dtype)) * grad)  # hidden: NaN
    return slopes.astype(logits.dtype), None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)
