"""A small convolutional network."""

import itertools

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.images import IMAGE, as_images, convolve, he, init_kernel
from jtrain.inspect.eject.pieces.layers import DROPOUT, Draws, drop, init_linear, linear

CHANNELS: tuple[int, ...] = (24, 48, 96)  # of each convolution
KERNEL: int = 3
WIDTHS: tuple[int, ...] = (10,)  # hidden layers behind the last pool, classes


def init_model(key):
    """Return the parameters, and what else the model carries."""
    draws, convolutions = Draws(key), []
    for a, b in itertools.pairwise((IMAGE[2], *CHANNELS)):
        kernel = init_kernel(draws, KERNEL, a, b, he(a * KERNEL**2))
        convolutions.append({"kernel": kernel, "bias": jnp.zeros(b)})
    halved = 2 ** len(CHANNELS)
    flat = (IMAGE[0] // halved) * (IMAGE[1] // halved) * CHANNELS[-1]
    pairs = itertools.pairwise((flat, *WIDTHS))
    layers = [init_linear(draws, a, b, he(a)) for a, b in pairs]
    named = lambda parts: {str(i): part for i, part in enumerate(parts)}
    return {"convolutions": named(convolutions), "layers": named(layers)}, {}


def model(params, extra, batch, keys):
    """Return the logits of each row."""
    layers = list(params["layers"].values())
    x = as_images(batch["image"], batch["mask"], layers[0]["kernel"].dtype)
    for layer in params["convolutions"].values():
        # Bias and ReLU change no order, so they come after the pool, on a quarter of the numbers.
        x = max_pool(convolve(x, layer["kernel"]))
        x = jax.nn.relu(x + layer["bias"][None, None, None])
    x = x.reshape(x.shape[0], -1)
    if DROPOUT > 0:
        x = drop(x, keys, 0)
    for site, layer in enumerate(layers[:-1], 1):
        x = jax.nn.relu(linear(layer, x))
        if DROPOUT > 0:
            x = drop(x, keys, site)
    return linear(layers[-1], x), extra


def max_pool(x):
    """Return the maximum of each 2 x 2 square."""
    b, h, w, c = x.shape
    rows, columns = h // 2, w // 2
    return tile_max(x[:, : rows * 2, : columns * 2].reshape(b, rows, 2, columns, 2, c))


@jax.custom_jvp
def tile_max(x):
    """Return the maximum of each tile, b i m j n c; equal maxima share the gradient."""
    return x.max((2, 4))


def tile_max_jvp(primals, tangents):
    """Return the maxima, and the mean tangent of each tile's equal maxima."""
    (x,), (tangent,) = primals, tangents
    y = tile_max(x)
    hits = x == y[:, :, None, :, None]
    count = hits.sum((2, 4), dtype=jnp.int32).astype(tangent.dtype)
    share = hits.astype(tangent.dtype) / count[:, :, None, :, None]
    return y, (tangent * share).sum((2, 4))


tile_max.defjvp(tile_max_jvp)
