"""Heat along a rod, from its equation: places, a network, and the loss of both."""

import math

import jax
import jax.numpy as jnp

CONDUCTIVITY: float = 0.1
WAVES: tuple[int, ...] = (1, 3)  # half waves of heat along the rod at the start
WIDTHS: tuple[int, ...] = (32, 32, 32)
START: float = 10.0  # weight of the error at time 0, beside the equation's
ENDS: float = 10.0  # weight of the error at the ends of the rod


def init_model(key):
    """Return the parameters, by Glorot and Bengio 2010, and what else the model carries."""
    sizes = (2, *WIDTHS, 1)
    pairs = list(zip(jax.random.split(key, len(sizes)), sizes, sizes[1:], strict=False))
    draw = lambda key, i, o: jax.random.normal(key, (i, o)) * math.sqrt(2 / (i + o))
    return [{"kernel": draw(*pair), "bias": jnp.zeros(pair[2])} for pair in pairs], {}


def heat(params, x, t):
    """Return the temperature at one place and time."""
    *hidden, last = params
    h = jnp.stack([2 * x - 1, 2 * t - 1])
    for layer in hidden:
        h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
    return (h @ last["kernel"] + last["bias"])[0]


def exact(x, t):
    """Return the exact solution: half wave n fades by conductivity x (n pi)^2."""
    fades = lambda n: jnp.exp(-CONDUCTIVITY * (n * math.pi) ** 2 * t)
    return jnp.stack([fades(n) * jnp.sin(n * math.pi * x) / n for n in WAVES]).sum(0)
