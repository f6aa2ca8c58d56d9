"""A vision transformer (Dosovitskiy et al. 2021)."""
# pyright: reportArgumentType=false

import jax.numpy as jnp

from jtrain.inspect.eject.pieces.block import LAYERS, STD, WIDTH, apply_block, init_block
from jtrain.inspect.eject.pieces.images import IMAGE, as_images
from jtrain.inspect.eject.pieces.layers import (
    DROPOUT,
    Draws,
    add_positions,
    drop,
    init_linear,
    linear,
)
from jtrain.inspect.eject.pieces.norms import init_norm, norm_last

PATCH: int = 4  # height and width of a patch
POSITIONS: int = 50  # patches, and the class token
CLASS_TOKEN: bool = True  # whether the head reads a token before the patches, or their mean
CLASSES: int = 10


def init_model(key):
    """Return the parameters, and what else the model carries."""
    draws = Draws(key)
    params = {"patches": init_linear(draws, PATCH**2 * IMAGE[2], WIDTH, STD)}
    if CLASS_TOKEN:
        params["token"] = draws.normal((WIDTH,), STD)
    params["positions"] = draws.normal((POSITIONS, WIDTH), STD)
    params["blocks"] = {str(i): init_block(draws) for i in range(LAYERS)}
    params["norm"] = init_norm(WIDTH)
    params["head"] = init_linear(draws, WIDTH, CLASSES, STD)
    return params, {}


def model(params, extra, batch, keys):
    """Return the logits of each row."""
    x = as_images(batch["image"], batch["mask"], params["positions"].dtype)
    x = linear(params["patches"], cut(x))  # b t d
    if CLASS_TOKEN:
        first = jnp.broadcast_to(params["token"][None, None], (len(x), 1, WIDTH))
        x = jnp.concatenate([first, x], 1)
    x = add_positions(x, params["positions"])
    if DROPOUT > 0:
        x = drop(x, keys, 0)
    for index in range(LAYERS):
        x, _ = apply_block(params["blocks"][str(index)], x, None, keys, index)
    x = norm_last(params["norm"], x[:, :1] if CLASS_TOKEN else x)
    return linear(params["head"], x.astype(jnp.float32).mean(1).astype(x.dtype)), extra


def cut(x):
    """Return the patches of each image, row by row."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c).swapaxes(2, 3)
    return x.reshape(b, -1, PATCH * PATCH * c)
