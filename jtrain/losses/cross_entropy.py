"""Cross entropy: integer labels, soft labels, two classes, or a teacher's probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import (
    check_labels_shape,
    check_mask,
    check_same_shape,
    in_domain,
    in_range,
    spread_weights,
)


def cross_entropy(
    logits: Float[Array, "b c"],
    labels: Integer[Array, "b"],
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
    loss = cross_entropy_per_label(logits, labels, smoothing)
    return Mean.of(loss, mask), {"accuracy": Mean.of(hits, mask)}


def cross_entropy_per_label(
    logits: Float[Array, "*b c"], labels: Integer[Array, "*b"], smoothing: float = 0.0
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
    # In 8 bits the classes from 256 on would count from 0 again, each for several labels.
    return _per_label(logits, in_range(labels, logits, -1).astype(jnp.int32), smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _per_label(logits, labels, smoothing):
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


_per_label.defvjp(_forward, _backward)


def soft_cross_entropy(
    logits: Float[Array, "b c"],
    chances: Float[Array, "b n"],
    mask: Bool[Array, "b"],
    weights: Shaped[Array, "b"] | None = None,
) -> tuple[Mean, Metrics]:
    """Return minus the sum of chance x log softmax(logits), in nats a row where `mask` is true.

    The metric `accuracy` is the share of rows whose likeliest class has the greatest chance.
    `chances` are at least 0, need not add up to 1 and have no gradient. Both
    count a row `weights` times.

    Raises:
        LossError: if the numbers of chances and logits differ.
    """
    check_same_classes(logits, chances, "chances")
    check_mask(mask, logits.shape[:1])
    rows = mask[:, None]
    wide = jnp.where(rows, at_least_f32(logits), 0)  # masked rows may be NaN
    target = jax.lax.stop_gradient(jnp.where(rows, at_least_f32(chances), 0))
    target = in_domain(target, "weights of classes")
    values = -_products(target, jax.nn.log_softmax(wide, -1)).sum(-1)
    hits = (wide.argmax(-1) == target.argmax(-1)).astype(jnp.float32)
    return Mean.of(values, mask, weights), {"accuracy": Mean.of(hits, mask, weights)}


def check_same_classes(
    logits: Float[Array, "b c"], others: Float[Array, "b n"], called: str
) -> None:
    """Raise LossError unless `others` has the number of classes of `logits`."""
    if logits.shape != others.shape:
        raise LossError(
            f"the logits have {logits.shape[-1]} classes and the {called} {others.shape[-1]}. Give "
            f"{called} of shape {logits.shape}, one a class; integer labels are for cross_entropy."
        )


def _products(chances, log_chances):
    """Multiply; a class of chance 0 gives 0, even for a logit of minus infinity."""
    return jnp.where(chances == 0, 0, chances * jnp.where(chances == 0, 0, log_chances))


def binary_cross_entropy(
    logits: Float[Array, "b *s"],
    labels: Float[Array, "b *s"] | Bool[Array, "b *s"],
    mask: Bool[Array, "b"],
    weights: Shaped[Array, "b *w"] | None = None,
) -> tuple[Mean, Metrics]:
    """Return nats a number between sigmoid(logits) and `labels`, over rows where `mask` is true.

    The metric `accuracy` is the share of logits above 0 exactly where the label is above 1/2. Both
    count a row `weights` times.
    Labels are probabilities in 0 .. 1, or bools. The loss of others has no minimum: they are
    rejected in the first batch, and cannot be inside `jax.jit`.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(logits, labels, mask, ("logits", "labels"))
    rows = jnp.expand_dims(mask, range(1, logits.ndim))
    wide = jnp.where(rows, at_least_f32(logits), 0)  # masked rows may be NaN
    wanted = in_domain(jnp.where(rows, labels.astype(wide.dtype), 0), "probabilities")
    # softplus(z) - y z: exact for large z of either sign.
    values = jax.nn.softplus(wide) - wanted * wide
    numbers = jnp.broadcast_to(rows, wide.shape)
    hits = ((wide > 0) == (wanted > 0.5)).astype(jnp.float32)
    each = spread_weights(weights, wide.shape)
    return Mean.of(values, numbers, each), {"accuracy": Mean.of(hits, numbers, each)}


def distillation(
    student: Float[Array, "b c"],
    teacher: Float[Array, "b n"],
    mask: Bool[Array, "b"],
    *,
    temperature: float = 1.0,
) -> tuple[Mean, Metrics]:
    """Return temperature^2 x KL(teacher, student) in nats a row, of softmax(logits / temperature).

    The square keeps the gradient's size as the temperature changes. The teacher's logits have no
    gradient; its parameters belong in `extra` (`jtrain.stateful`). The metric `agreement` is the
    share of rows with the same likeliest class.

    Raises:
        LossError: if the numbers of classes differ, or the temperature is not positive.

    Source: Hinton et al. 2015, arXiv 1503.02531.
    """
    check_same_classes(student, teacher, "teacher's logits")
    check_mask(mask, student.shape[:1])
    if not temperature > 0:
        raise LossError(
            f"temperature {temperature} cannot divide the logits. Give a positive number: "
            f"temperature=1.0 changes nothing, 2 to 5 is usual."
        )
    log_chances = [
        jax.nn.log_softmax(jnp.where(mask[:, None], at_least_f32(x), 0) / temperature, -1)
        for x in (jax.lax.stop_gradient(teacher), student)
    ]
    target = jnp.exp(log_chances[0])
    difference = jnp.where(target == 0, 0, log_chances[0]) - log_chances[1]
    values = temperature**2 * jnp.where(target == 0, 0, target * difference).sum(-1)
    agree = (student.argmax(-1) == teacher.argmax(-1)).astype(jnp.float32)
    return Mean.of(values, mask), {"agreement": Mean.of(agree, mask)}
