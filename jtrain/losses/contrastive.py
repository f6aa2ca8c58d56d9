"""Contrastive loss of two towers: which right belongs to which left, among all rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.losses.cross_entropy import nats
from jtrain.losses.shapes import check_same_shape

STEEPEST = 100.0  # of the scale, as CLIP bounds it


def contrastive(
    left: Float[Array, "b d"],
    right: Float[Array, "b d"],
    log_scale: Float[Array, ""],
    mask: Bool[Array, "b"],
) -> tuple[Mean, Metrics]:
    """InfoNCE in nats a row, the mean of left to right and right to left.

    Row i of `left` belongs to row i of `right`; all other rows where `mask` holds are wrong. Rows
    are scaled to length 1; `exp(log_scale)`, at most 100, is the reciprocal of the temperature and
    may be learned (start: log(1 / 0.07)). The metric `accuracy` is how often a left finds its
    right.

    Each row meets all others: such an experiment says `couples="batch"`. It is then exact over
    devices, where the compiler gathers the rows, and refused with microbatches or copies of the
    step, which would compare within a part of the batch.

    Raises:
        LossError: if the shapes differ.

    Source: Radford et al. 2021 (CLIP), arXiv 2103.00020, figure 3.
    """
    check_same_shape(left, right, mask, ("left", "right"))
    left, right = _of_length_one(left, mask), _of_length_one(right, mask)
    scale = jnp.minimum(jnp.exp(at_least_f32(log_scale)), STEEPEST)
    exact = jax.lax.Precision.HIGHEST  # at a scale of 100, products in bfloat16 are 0.2 off
    likeness = scale * jnp.einsum("ld,rd->lr", left, right, precision=exact)
    own = jnp.arange(len(mask), dtype=jnp.int32)
    # A hidden row is nobody's choice; for itself it has one, so that nothing is infinite.
    choices = (mask[:, None] & mask[None]) | (own[:, None] == own[None])
    likeness = jnp.where(choices, likeness, -jnp.inf)
    values = (nats(likeness, own) + nats(likeness.T, own)) / 2
    hits = (likeness.argmax(1) == own).astype(jnp.float32)
    return Mean.of(values, mask), {"accuracy": Mean.of(hits, mask)}


def _of_length_one(x: Float[Array, "b d"], mask: Bool[Array, "b"]) -> Float[Array, "b d"]:
    x = jnp.where(mask[:, None], at_least_f32(x), 1)  # what a mask hides may be NaN
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-12))
