"""Cross entropy of the next token."""

import jax.numpy as jnp

from jtrain.inspect.eject.pieces.cross_entropy import cross_entropy
from jtrain.inspect.eject.pieces.layers import DROPOUT, row_keys
from jtrain.inspect.eject.pieces.sums import sum_rows
from jtrain.inspect.eject.pieces.transformer import TIED, hidden_states


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    keys = row_keys(key, batch) if DROPOUT > 0 else None
    hidden, _ = hidden_states(params, inputs, keys)
    logits = jnp.einsum("btd,vd->btv", hidden, params["tokens" if TIED else "head"])
    real = jnp.broadcast_to(batch["mask"][:, None], targets.shape)
    return [(1.0, *sum_rows(cross_entropy(logits, targets), real))], extra
