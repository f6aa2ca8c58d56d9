"""Cross entropy with integer labels."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.trees import at_least_f32
from jtrain.types import Mean, Metrics


def cross_entropy(
    logits: Float[Array, "b c"], labels: Int[Array, "b"], mask: Bool[Array, "b"]
) -> tuple[Mean, Metrics]:
    """Nats a row where `mask` holds, and the accuracy there.

    A label must lie in 0 .. c-1; nothing inside `jax.jit` can check that, so one that does not has
    the loss of the nearest class (where it is hidden by the mask it counts for nothing).
    """
    hits = (logits.argmax(-1) == labels).astype(jnp.float32)
    return Mean.of(nats(logits, labels), mask), {"accuracy": Mean.of(hits, mask)}


@jax.custom_vjp
def nats(logits: Float[Array, "*b c"], labels: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """-log softmax(logits) at the labels, in at least float32.

    The backward pass is softmax minus one-hot, from the logits and their log-sum-exp: no scatter.
    Only reverse mode: `jax.jvp` and `jax.hessian` raise.
    """
    return _forward(logits, labels)[0]


def _forward(logits, labels):
    labels = labels.clip(0, logits.shape[-1] - 1)
    wide = at_least_f32(logits)
    log_total = jax.nn.logsumexp(wide, -1)
    at_label = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return log_total - at_label, (logits, labels, log_total)


def _backward(saved, grad):
    logits, labels, log_total = saved
    chances = jnp.exp(at_least_f32(logits) - log_total[..., None])
    classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    one_hot = (jnp.expand_dims(classes, range(labels.ndim)) == labels[..., None]).astype(grad.dtype)
    grad = grad[..., None]
    g = jnp.where(grad == 0, 0, (chances - one_hot) * grad)  # what a mask hides may be NaN
    return g.astype(logits.dtype), np.zeros(labels.shape, jax.dtypes.float0)


nats.defvjp(_forward, _backward)
