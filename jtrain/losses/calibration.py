"""Calibration of a classifier: its confidence and its accuracy, in bins."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


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
