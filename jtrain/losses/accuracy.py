"""Metrics of a classifier: accuracy, confusion matrix, and calibration."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def accuracy(
    logits: Float[Array, "*b c"],
    labels: Integer[Array, "*b"],
    mask: Bool[Array, "*b"],
    *,
    top: int = 1,
) -> Mean:
    """Return the share of labels among the `top` greatest logits, where `mask` is true.

    Of equal logits the first wins and NaN is the greatest, as in `argmax`. A label outside 0 .. c-1
    is a miss.

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
    labels = labels.astype(jnp.int32)  # 8 bits hold no class from 256 on
    known = (labels >= 0) & (labels < classes)
    logits = jnp.where(jnp.isnan(logits), jnp.inf, logits)  # no number is ahead of NaN
    own = jnp.take_along_axis(logits, labels.clip(0, classes - 1)[..., None], -1)
    index = jnp.expand_dims(jnp.arange(classes, dtype=jnp.int32), range(labels.ndim))
    ahead = (logits > own) | ((logits == own) & (index < labels[..., None]))
    hits = known & (ahead.sum(-1) < top)
    return Mean.of(hits.astype(jnp.float32), mask)


def confusion(
    logits: Float[Array, "*b c"], labels: Integer[Array, "*b"], mask: Bool[Array, "*b"]
) -> Mean:
    """Return the shares (label, likeliest class) of the rows where `mask` is true.

    `.total` are the counts, exact up to 2^24 a batch; `.value()` their shares, which add up to 1. A
    label outside 0 .. c-1 is in no count, but in the number of rows.

    Raises:
        LossError: if the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    classes = jnp.expand_dims(jnp.arange(logits.shape[-1], dtype=jnp.int32), range(mask.ndim))
    true = labels.astype(jnp.int32)[..., None] == classes
    true = (true & mask[..., None]).astype(jnp.float32)
    predicted = logits.argmax(-1).astype(jnp.int32)
    one_hot = (predicted[..., None] == classes).astype(jnp.float32)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return Mean(flat(true).T @ flat(one_hot), mask.sum(dtype=jnp.float32))


def calibration(
    logits: Float[Array, "*b c"],
    labels: Integer[Array, "*b"],
    mask: Bool[Array, "*b"],
    *,
    bins: int = 15,
) -> Metrics:
    """Return the mean `confidence` and the accuracy, `right`, in bins of the confidence.

    Confidence is the probability of the likeliest class. Both metrics have shape (bins,), weighted
    by the rows in each bin where `mask` is true. The bins are of equal width,
    (i / bins, (i + 1) / bins]. `expected_calibration_error` takes the metrics of all rows: the
    error itself is not a sum over rows.

    Raises:
        LossError: if `bins` is not positive, or the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    if bins < 1:
        raise LossError(f"a calibration of {bins} bins is empty. Give at least 1; 15 is usual.")
    wide = jnp.where(mask[..., None], at_least_f32(logits), 0)  # masked rows may be NaN
    confidence = jax.nn.softmax(wide, -1).max(-1).ravel()
    right = (wide.argmax(-1) == labels).astype(jnp.float32).ravel()
    index = jnp.ceil(confidence * bins).astype(jnp.int32) - 1
    member = (index[:, None] == jnp.arange(bins, dtype=jnp.int32)[None]) & mask.ravel()[:, None]
    member = member.astype(jnp.float32)
    by_bin = lambda x: Mean((x[:, None] * member).sum(0), member.sum(0))
    return {"confidence": by_bin(confidence), "right": by_bin(right)}


def expected_calibration_error(bins: Metrics) -> float:
    """Return the mean of |confidence - right| over all rows, on the host; wait for the device.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3.
    """
    confidence, right = bins["confidence"], bins["right"]
    gap = np.abs(np.asarray(confidence.total, np.float64) - np.asarray(right.total, np.float64))
    return float(gap.sum() / np.asarray(confidence.weight, np.float64).sum())
