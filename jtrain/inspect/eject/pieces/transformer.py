"""A decoder-only transformer."""
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.inspect.eject.pieces.block import (
    HEAD_SIZE,
    LAYERS,
    ROTARY,
    STD,
    WIDTH,
    apply_block,
    init_block,
)
from jtrain.inspect.eject.pieces.layers import BF16, DROPOUT, Draws, add_positions, drop
from jtrain.inspect.eject.pieces.norms import init_norm, norm_last

VOCAB: int = 65
POSITIONS: int = 64  # of a context, each with a vector
LEARNED: bool = True
BASE: float = 10000.0  # reciprocal of the slowest angle, about
TIED: bool = True  # whether the embedding of the tokens is the head, too
SCAN: bool = False
REMAT: str = "none"
TABLES: int = 1


def init_model(key):
    """Return the parameters, and what else the model carries."""
    draws = Draws(key)
    params = {"tokens": draws.normal((VOCAB, WIDTH), STD)}
    if LEARNED:
        params["positions"] = draws.normal((POSITIONS, WIDTH), STD)
    blocks = [init_block(draws) for _ in range(LAYERS)]
    if SCAN:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    else:
        params["blocks"] = {str(i): block for i, block in enumerate(blocks)}
    params["norm"] = init_norm(WIDTH)
    if not TIED:
        params["head"] = draws.normal((VOCAB, WIDTH), STD)
    return params, {}


def hidden_states(params, tokens, keys):
    """Return the input of the head, b t d, and the logits of the routers, if there are any."""
    x = look_up(params["tokens"], tokens)
    if LEARNED:
        x = add_positions(x, params["positions"][: tokens.shape[1]])
    if DROPOUT > 0:
        x = drop(x, keys, 0)
    angles = rotary_angles(tokens.shape[1]) if ROTARY else None
    apply = lambda x, block, index: apply_block(block, x, angles, keys, index)
    if REMAT == "full":  # save the inputs of the blocks alone, and compute the rest again
        apply = jax.checkpoint(apply, prevent_cse=not SCAN)
    elif REMAT == "dots":  # save what matrix products give, and compute the rest again
        apply = jax.checkpoint(
            apply, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=not SCAN
        )
    if SCAN:  # a program as small as one block
        numbered = (params["blocks"], jnp.arange(LAYERS))
        x, routed = jax.lax.scan(lambda x, one: apply(x, *one), x, numbered)
    else:
        routed = []
        for index in range(LAYERS):
            x, logits = apply(x, params["blocks"][str(index)], index)
            routed.append(logits)
    return norm_last(params["norm"], x), routed


def look_up(table, tokens):
    """Return the embeddings of tokens."""
    if TABLES > 1:  # the gradients of equal tokens are added in blocks: a long sum rounds more
        block = jnp.arange(tokens.shape[1], dtype=tokens.dtype)[None] % TABLES
        return jnp.broadcast_to(table[None], (TABLES, *table.shape))[block, tokens]
    elif BF16:  # the gradients of equal tokens are added in float32
        return table.astype(jnp.float32)[tokens].astype(table.dtype)
    else:
        return table[tokens]


def rotary_angles(time):
    """Return cosine and sine of the angles of each position (Su et al. 2021)."""
    radians = BASE ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angles = jnp.multiply.outer(
        jnp.arange(time).astype(jnp.float32), jnp.asarray(radians, jnp.float32)
    )
    return jnp.cos(angles), jnp.sin(angles)
