"""Whether a classifier that says 70 % is right 70 times of 100."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def calibration(
    logits: Float[Array, "*b c"],
    labels: Int[Array, "*b"],
    mask: Bool[Array, "*b"],
    *,
    bins: int = 15,
) -> Metrics:
    """By `bins` of the likeliest class's chance, its mean `confidence` and how often it is `right`.

    Both of shape (bins,), weighed by how many fell into each; where `mask` holds. The bins are of
    equal width, (i / bins, (i + 1) / bins]. `expected_calibration_error` reads them, when all is
    added up: the error itself is no sum over rows.

    Raises:
        LossError: if `bins` is not positive, or the shapes do not belong together.
    """
    check_labels_shape(logits, labels, mask)
    if bins < 1:
        raise LossError(f"a calibration of {bins} bins says nothing. Give at least 1; 15 is usual.")
    wide = jnp.where(mask[..., None], at_least_f32(logits), 0)  # what a mask hides may be NaN
    confidence = jax.nn.softmax(wide, -1).max(-1).ravel()
    right = (wide.argmax(-1) == labels).astype(jnp.float32).ravel()
    into = jnp.ceil(confidence * bins).astype(jnp.int32) - 1
    member = (into[:, None] == jnp.arange(bins, dtype=jnp.int32)[None]) & mask.ravel()[:, None]
    member = member.astype(jnp.float32)
    of = lambda x: Mean((x[:, None] * member).sum(0), member.sum(0))
    return {"confidence": of(confidence), "right": of(right)}


def expected_calibration_error(bins: Metrics) -> float:
    """The mean of |confidence - right| over all rows, on the host; waits for the device.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3.
    """
    told, right = bins["confidence"], bins["right"]
    gap = np.abs(np.asarray(told.total, np.float64) - np.asarray(right.total, np.float64))
    return float(gap.sum() / np.asarray(told.weight, np.float64).sum())
