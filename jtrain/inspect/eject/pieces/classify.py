"""The loss of a classifier."""

import jax.numpy as jnp

from jtrain.inspect.eject.pieces.classifier_mlp import model
from jtrain.inspect.eject.pieces.cross_entropy import cross_entropy
from jtrain.inspect.eject.pieces.layers import DROPOUT, row_keys
from jtrain.inspect.eject.pieces.sums import sum_rows


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on."""
    keys = row_keys(key, batch) if DROPOUT > 0 else None
    logits, extra = model(params, extra, batch, keys)
    nats = cross_entropy(logits, batch["label"].astype(jnp.int32))
    return [(1.0, *sum_rows(nats, batch["mask"]))], extra
