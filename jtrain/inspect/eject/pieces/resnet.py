"""A residual network with batch norm (He et al. 2016)."""

import math

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.images import IMAGE, as_images, convolve, init_kernel
from jtrain.inspect.eject.pieces.layers import DROPOUT, Draws, drop, init_linear, linear

BLOCKS: tuple[int, ...] = (2, 2, 2, 2)  # of each stage, which is twice as wide as the one before
WIDTH: int = 64  # of the first stage
BOTTLENECK: bool = False
CLASSES: int = 10
QUIET: bool = False
NORM_EPSILON = 1e-5
DECAY_OF_STATISTICS = 0.9  # a step


def init_convolution(draws, inputs, outputs, size):
    """Return a convolution without bias, whose gradients keep their size backward."""
    std = math.sqrt(2 / (size * size * outputs))
    return {"kernel": init_kernel(draws, size, inputs, outputs, std)}


def init_batch_norm(channels, scale=1.0):
    """Return the parameters of a batch norm, and its running statistics."""
    params = {"scale": jnp.full(channels, scale), "bias": jnp.zeros(channels)}
    return params, {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}


def shapes():
    """Yield the convolutions of each block, (inputs, outputs, size, stride), and the last width."""
    channels = WIDTH
    for stage, count in enumerate(BLOCKS):
        for index in range(count):
            width, stride = WIDTH * 2**stage, 2 if stage and not index else 1
            if BOTTLENECK:
                layers = [(channels, width, 1, 1), (width, width, 3, stride)]
                layers.append((width, 4 * width, 1, 1))
            else:
                layers = [(channels, width, 3, stride), (width, width, 3, 1)]
            short = channels != layers[-1][1] or stride != 1
            yield layers, (channels, layers[-1][1], 1, stride) if short else None
            channels = layers[-1][1]


def init_model(key):
    """Return the parameters, and the running statistics of the norms."""
    draws, params, extra = Draws(key), {}, {}
    params["stem"] = init_convolution(draws, IMAGE[2], WIDTH, 3)
    params["norm"], extra["norm"] = init_batch_norm(WIDTH)
    params["blocks"], extra["blocks"], channels = {}, {}, WIDTH
    for number, (layers, short) in enumerate(shapes()):
        block = {"convolutions": {}, "norms": {}}
        running = {"norms": {}}
        for i, (a, b, size, _) in enumerate(layers):
            block["convolutions"][str(i)] = init_convolution(draws, a, b, size)
            last = i == len(layers) - 1
            made = init_batch_norm(b, 0.0 if last and QUIET else 1.0)
            block["norms"][str(i)], running["norms"][str(i)] = made
            channels = b
        if short is not None:
            block["short"] = init_convolution(draws, *short[:3])
            block["norm_short"], running["norm_short"] = init_batch_norm(short[1])
        params["blocks"][str(number)], extra["blocks"][str(number)] = block, running
    params["head"] = init_linear(draws, channels, CLASSES, 0.01)
    return params, extra


def model(params, extra, batch, keys):
    """Return the logits of each row, and the next running statistics."""
    mask, new = batch["mask"], {"blocks": {}}
    x = as_images(batch["image"], mask, params["stem"]["kernel"].dtype)
    x, new["norm"] = batch_norm(params["norm"], extra["norm"], convolve_by(params["stem"], x), mask)
    x = jax.nn.relu(x)
    for number, (layers, short) in enumerate(shapes()):
        name = str(number)
        block, running = params["blocks"][name], extra["blocks"][name]
        x, new["blocks"][name] = residual(block, running, x, mask, layers, short)
    x = x.astype(jnp.float32).mean((1, 2)).astype(x.dtype)
    if DROPOUT > 0:
        x = drop(x, keys, 0)
    return linear(params["head"], x), new


def residual(block, running, x, mask, layers, short):
    """Return a block's outputs: convolutions with norms, added to its input, and ReLU."""
    y, new = x, {"norms": {}}
    for i, (_, _, _, stride) in enumerate(layers):
        name = str(i)
        y = jax.nn.relu(y) if i else y
        y = convolve_by(block["convolutions"][name], y, stride)
        y, new["norms"][name] = batch_norm(block["norms"][name], running["norms"][name], y, mask)
    if short is not None:
        x = convolve_by(block["short"], x, short[3])
        x, new["norm_short"] = batch_norm(block["norm_short"], running["norm_short"], x, mask)
    return jax.nn.relu(x + y), new


def convolve_by(layer, x, stride=1):
    """Apply a convolution."""
    return convolve(x, layer["kernel"], stride)


def batch_norm(layer, running, x, mask):
    """Normalise each channel over the batch; return the next running statistics, too."""
    real, leading = mask.astype(jnp.float32), (0, 1, 2)
    scale, bias = (layer[name].astype(jnp.float32) for name in ("scale", "bias"))
    y, mean, var = standardize_rows(x, real)
    numbers = real.sum() * (x.shape[1] * x.shape[2])
    unbiased = var * numbers / jnp.maximum(numbers - 1, 1)
    new = {"mean": mean, "var": unbiased}
    keep = lambda old, x: DECAY_OF_STATISTICS * old + (1 - DECAY_OF_STATISTICS) * x
    after = jax.tree.map(keep, running, jax.lax.stop_gradient(new))
    y = y.astype(jnp.float32) * jnp.expand_dims(scale, leading) + jnp.expand_dims(bias, leading)
    return y.astype(x.dtype), after


@jax.custom_vjp
def standardize_rows(x, real):
    """Give `x` mean 0 and variance 1 in each channel over the rows where `real` is 1; return both.

    Written with its gradient, which saves one array.
    """
    return standardize_forward(x, real)[0]


def mean_of_rows(x, real):
    """Return the mean over the real rows, 1 1 1 c; sums are within rows first, then over rows."""
    by_row = jax.lax.optimization_barrier(x.sum((1, 2)))  # b c
    total = (by_row * real[:, None]).sum(0)
    return (total / (jnp.maximum(real.sum(), 1) * x.shape[1] * x.shape[2]))[None, None, None]


def standardize_forward(x, real):
    """Save the standardized numbers and the rate."""
    wide = x.astype(jnp.float32)
    mean = mean_of_rows(wide, real)
    centred = wide - mean
    var = mean_of_rows(jnp.square(centred), real)
    rate = jax.lax.rsqrt(var + NORM_EPSILON)
    y = (centred * rate).astype(x.dtype)
    return (y, mean.reshape(-1), var.reshape(-1)), (y, rate, real)


def standardize_backward(saved, grads):
    """Return the gradient: the statistics affect every row, and real rows affect them."""
    y, rate, real = saved
    wide, g = y.astype(jnp.float32), grads[0].astype(jnp.float32)
    all_rows = jnp.ones_like(real)
    share = len(real) / jnp.maximum(real.sum(), 1)
    level = mean_of_rows(g, all_rows) * share
    slope = mean_of_rows(g * wide, all_rows) * share
    shows = jnp.expand_dims(real, (1, 2, 3))
    return (rate * (g - shows * (level + wide * slope))).astype(y.dtype), jnp.zeros_like(real)


standardize_rows.defvjp(standardize_forward, standardize_backward)
