"""InfoNCE of embeddings: each anchor finds its positive among all positives and hard negatives."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.contrastive import normalize_rows
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.losses.shapes import check_same_shape


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
    are no candidates. The metric `accuracy` is the share of anchors whose best candidate is their
    own positive.

    All rows are coupled, as in `contrastive`: the experiment declares `couples="batch"`, and
    `jtrain.models.embeddings.map_rows` embeds the rows in the place of microbatches.

    Raises:
        LossError: if the shapes differ, or the temperature is not above 0.

    Sources: Oord et al. 2018, arXiv 1807.03748, equation 4; with hard negatives Karpukhin et al.
    2020, arXiv 2004.04906, section 3.2; 0.05 is the 1 / 20 of sentence-transformers.
    """
    _check(anchors, positives, negatives, mask, temperature)
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
    # A hidden row is no candidate except for itself, so that nothing is infinite.
    scores = jnp.where(
        real[None] | (columns[None] == own[:, None]), cosines / temperature, -jnp.inf
    )
    hits = (scores.argmax(1) == own).astype(jnp.float32)
    return Mean.of(cross_entropy_per_label(scores, own), mask), {"accuracy": Mean.of(hits, mask)}


def _check(
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
