"""The loss of a mixture of experts: that of the tokens, and two of the routers."""
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.block import EXPERTS, TOP_K
from jtrain.inspect.eject.pieces.chunked_next_token import language_loss
from jtrain.inspect.eject.pieces.sums import sum_rows
from jtrain.inspect.eject.pieces.transformer import SCAN

UNEVEN: float = 1e-2  # coefficient of the balance loss
ROUTER_Z: float = 1e-3  # coefficient of the square of the log of the routers' denominators


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on."""
    nats, real, routed = language_loss(params, batch, key)
    logits = jnp.moveaxis(routed if SCAN else jnp.stack(routed), 0, 1)  # b l t e
    wide = jnp.where(real[:, None, :, None], logits, 0)
    squares = jnp.square(jax.nn.logsumexp(wide, -1))
    router_z = sum_rows(squares, jnp.broadcast_to(real[:, None], squares.shape))
    terms = [(1.0, *nats), (UNEVEN, *balance(wide, real)), (ROUTER_Z, *router_z)]
    return terms, extra


def balance(logits, real):
    """Return the sum over rows of the balance loss, 1 where all experts are used equally, and the
    number of tokens. Each row is balanced by itself (Fedus et al. 2021, equations 4 to 6)."""
    mask = real[:, None, :, None]
    order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
    counts = jnp.where(mask, jax.nn.one_hot(order[..., :TOP_K], EXPERTS).sum(-2), 0)
    chances = jnp.where(mask, jax.nn.softmax(logits, -1), 0)
    tokens = real.sum(1, dtype=jnp.float32)
    uses, chance = counts.sum(2), chances.sum(2)  # b l e
    by_layer = EXPERTS / TOP_K * (uses * chance).sum(-1) / jnp.maximum(tokens, 1)[..., None]
    return by_layer.mean(-1).sum(), tokens.sum()
