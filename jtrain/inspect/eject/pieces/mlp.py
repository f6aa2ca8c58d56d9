"""A multilayer perceptron."""

import itertools
import math

import jax

from jtrain.inspect.eject.pieces.layers import DROPOUT, Draws, drop, init_linear, linear


def init_mlp(key, sizes):
    """Return the layers of a perceptron, by He et al. 2015."""
    draws, pairs = Draws(key), itertools.pairwise(sizes)
    layers = [init_linear(draws, a, b, math.sqrt(2 / a)) for a, b in pairs]
    return {"layers": {str(i): layer for i, layer in enumerate(layers)}}


def mlp(params, x, keys):
    """Return the outputs b c of rows b ..., with ReLU and dropout between the layers."""
    layers = list(params["layers"].values())
    x = x.astype(layers[0]["kernel"].dtype).reshape(len(x), -1)
    for site, layer in enumerate(layers[:-1]):
        x = jax.nn.relu(linear(layer, x))
        if DROPOUT > 0:
            x = drop(x, keys, site)
    return linear(layers[-1], x)
