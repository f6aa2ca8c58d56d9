"""Cross entropy of the next token."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Metrics
from jtrain.losses.cross_entropy import nats
from jtrain.losses.shapes import check_labels_shape


def next_token(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], real: Bool[Array, "b t"]
) -> tuple[Mean, Metrics]:
    """Nats a token where `real`, and the accuracy there.

    A target outside 0 .. v-1 is refused in a first batch, and has the loss of the nearest token in
    a later one, as in `cross_entropy`.

    Raises:
        LossError: if the shapes do not belong together.
    """
    check_labels_shape(logits, targets, real)
    hits = (logits.argmax(-1) == targets).astype(jnp.float32)
    return Mean.of(nats(logits, targets), real), {"accuracy": Mean.of(hits, real)}


def inputs_and_targets(
    batch: Batch,
) -> tuple[Int[Array, "b t"], Int[Array, "b t"], Bool[Array, "b t"]]:
    """A language batch's inputs, its targets, and which of those are real.

    `tokens` (b, t+1) gives both, one apart; the first `length` (b,) targets of a row count, if its
    `mask` holds. Without `length` all do. Where there are `segments` (b, t+1; 0 is padding), a
    target counts only if it is of its input's segment.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = batch.get("length", jnp.full(mask.shape, targets.shape[1], jnp.int32))
    real = jnp.arange(targets.shape[1], dtype=jnp.int32)[None] < length[:, None]
    if (segments := batch.get("segments")) is not None:
        real &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inputs, targets, real & mask[:, None]


def segments_of(batch: Batch) -> Int[Array, "b t"] | None:
    """The segments of a language batch's inputs; None where its rows are not packed."""
    segments = batch.get("segments")
    return None if segments is None else segments[:, :-1]
