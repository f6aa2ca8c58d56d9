"""Contrastive losses over all pairs of rows: of two towers, or with hard negatives."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.losses.shapes import check_same_shape

MAX_SCALE = 100.0  # as in CLIP


def contrastive(
    left: Float[Array, "b d"],
    right: Float[Array, "b d"],
    log_scale: Float[Array, ""],
    mask: Bool[Array, "b"],
) -> tuple[Mean, Metrics]:
    """Return InfoNCE in nats a row, the mean of left to right and right to left.

    Row i of `left` matches row i of `right`, and no other row where `mask` is true. Rows
    are scaled to length 1; `exp(log_scale)`, at most 100, is the reciprocal of the temperature and
    may be learned (start: log(1 / 0.07)). The metric `accuracy` is the share of left rows whose
    best match is their own.

    All rows interact: the experiment declares `rows_interact="batch"`. The loss is then exact over
    devices, where the compiler gathers the rows, and rejected with microbatches or replicas of the
    step, which would compare within a shard of the batch.

    Raises:
        LossError: if the shapes differ.

    Source: Radford et al. 2021 (CLIP), arXiv 2103.00020, figure 3.
    """
    check_same_shape(left, right, mask, ("left", "right"))
    left, right = normalize_rows(left, mask), normalize_rows(right, mask)
    scale = jnp.minimum(jnp.exp(at_least_f32(log_scale)), MAX_SCALE)
    exact = jax.lax.Precision.HIGHEST  # at a scale of 100, products in bfloat16 are 0.2 off
    similarity = scale * jnp.einsum("ld,rd->lr", left, right, precision=exact)
    own = jnp.arange(len(mask), dtype=jnp.int32)
    # A hidden row is not a candidate except for itself, so that nothing is infinite.
    candidates = (mask[:, None] & mask[None]) | (own[:, None] == own[None])
    similarity = jnp.where(candidates, similarity, -jnp.inf)
    to_columns = cross_entropy_per_label(similarity, own)
    to_rows = cross_entropy_per_label(similarity.T, own)
    values = (to_columns + to_rows) / 2
    hits = (similarity.argmax(1) == own).astype(jnp.float32)
    return Mean.of(values, mask), {"accuracy": Mean.of(hits, mask)}


def normalize_rows(x: Float[Array, "b d"], mask: Bool[Array, "b"]) -> Float[Array, "b d"]:
    """Return rows of length 1, in at least float32; masked rows, which may be NaN, are ones."""
    x = jnp.where(mask[:, None], at_least_f32(x), 1)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-12))


def info_nce(
    anchors: Float[Array, "b d"],
    positives: Float[Array, "b d"],
    negatives: Float[Array, "b n d"],
    mask: Bool[Array, "b"],
    *,
    temperature: float = 0.05,
) -> tuple[Mean, Metrics]:
    """Return nats a row of finding a row's positive by its cosine with the anchor.

    The candidates of every anchor are the positives of all rows and the n hard negatives of all
    rows: `b - 1` negatives in the batch and `b n` hard ones; n may be 0. Rows where `mask` is false
    are not candidates. The metric `accuracy` is the share of anchors whose best candidate is their
    own positive.

    All rows interact, as in `contrastive`: the experiment declares `rows_interact="batch"`, and
    `jtrain.models.map_rows` embeds the rows in the place of microbatches.

    Raises:
        LossError: if the shapes differ, or the temperature is not above 0.

    Sources: Oord et al. 2018, arXiv 1807.03748, equation 4; with hard negatives Karpukhin et al.
    2020, arXiv 2004.04906, section 3.2; 0.05 is the 1 / 20 of sentence-transformers.
    """
    _check_negatives(anchors, positives, negatives, mask, temperature)
    rows, count, width = negatives.shape
    real = jnp.concatenate([mask, jnp.repeat(mask, count)])
    candidates = jnp.concatenate([positives, negatives.reshape(rows * count, width)])
    exact = jax.lax.Precision.HIGHEST  # at 1 / 0.05, products in bfloat16 are 0.04 off
    cosines = jnp.einsum(
        "ad,cd->ac",
        normalize_rows(anchors, mask),
        normalize_rows(candidates, real),
        precision=exact,
    )
    own = jnp.arange(rows, dtype=jnp.int32)
    columns = jnp.arange(len(candidates), dtype=jnp.int32)
    # A hidden row is not a candidate except for itself, so that nothing is infinite.
    scores = jnp.where(
        real[None] | (columns[None] == own[:, None]), cosines / temperature, -jnp.inf
    )
    hits = (scores.argmax(1) == own).astype(jnp.float32)
    return Mean.of(cross_entropy_per_label(scores, own), mask), {"accuracy": Mean.of(hits, mask)}


def _check_negatives(
    anchors: Array, positives: Array, negatives: Array, mask: Array, temperature: float
) -> None:
    check_same_shape(anchors, positives, mask, ("anchors", "positives"))
    rows, _, width = negatives.shape
    if (rows, width) != anchors.shape:
        raise LossError(
            f"negatives of shape {negatives.shape} do not belong to anchors of shape "
            f"{anchors.shape}. Give n vectors of the anchors' width a row: ({anchors.shape[0]}, n, "
            f"{anchors.shape[1]}); without any, negatives of shape "
            f"({anchors.shape[0]}, 0, {anchors.shape[1]})."
        )
    if temperature <= 0:
        raise LossError(
            f"temperature {temperature} divides the cosines. Give a number above 0: "
            f"temperature=0.05 is usual."
        )
