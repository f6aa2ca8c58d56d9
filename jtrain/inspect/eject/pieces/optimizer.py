"""The optimizer, from optax."""

import math

import jax
import jax.numpy as jnp
import optax

STEPS: int = 200
LR: float = 3e-3  # peak
SCHEDULE: str = "cosine"
SPAN: int = 200  # steps of the schedule
WARMUP: int = 0
FINAL: float = 0.1  # share of the peak at the last step
RISE: float = 0.3
FIRST: float = 0.04
OPTIMIZER: str = "adamw"
B1: float = 0.9
B2: float = 0.999
EPS: float = 1e-8
MOMENTUM: float = 0.9
NESTEROV: bool = False
WEIGHT_DECAY: float = 0.05  # of matrices alone, not of biases and the scales of norms
CLIP: float = 0.0  # most of the gradient's norm
STACKED: bool = False


def learning_rate(step):
    """Return the rate of a step, from 0."""
    step = step.astype(jnp.float32)
    if SCHEDULE == "one_cycle":  # half a cosine up and half a cosine down (Smith and Topin 2017)
        last = SPAN - 1
        top = round(RISE * last)
        up = FIRST + (1 - FIRST) * half_cosine(1 - step / top)
        down = FINAL + (1 - FINAL) * half_cosine(jnp.clip((step - top) / (last - top), 0, 1))
        return LR * jnp.where(step < top, up, down)
    else:
        passed = jnp.clip((step - WARMUP) / max(SPAN - 1 - WARMUP, 1), 0, 1)
        if SCHEDULE == "cosine":
            fall = half_cosine(passed)
        elif SCHEDULE == "linear":
            fall = 1 - passed
        else:
            fall = jnp.ones_like(passed)
        share = FINAL + (1 - FINAL) * fall
        return LR * (jnp.minimum((step + 1) / (WARMUP + 1), 1) * share)


def half_cosine(x):
    """Return 1 to 0 as `x` goes from 0 to 1."""
    return (1 + jnp.cos(math.pi * x)) / 2


def matrices(params):
    """Return True for each leaf that decays."""
    if STACKED:  # the layers are stacked along the first dim of their leaves
        decays = lambda path, x: x.ndim - (path[0].key == "blocks") > 1
        return jax.tree_util.tree_map_with_path(decays, params)
    else:
        return jax.tree.map(lambda x: x.ndim > 1, params)


def decay(updates, params):
    """Add the decay to gradients. Also where it is 0: the sum decides what the compiler rounds."""
    add = lambda u, p, decays: u + (WEIGHT_DECAY if decays else 0.0) * p
    return jax.tree.map(add, updates, params, matrices(params))


if OPTIMIZER == "adamw":
    optimizer = optax.adamw(learning_rate, B1, B2, EPS, weight_decay=WEIGHT_DECAY, mask=matrices)
elif OPTIMIZER == "adam":
    optimizer = optax.chain(optax.stateless(decay), optax.adam(learning_rate, B1, B2, EPS))
else:
    rule = optax.sgd(learning_rate, MOMENTUM or None, NESTEROV)
    optimizer = optax.chain(optax.stateless(decay), rule)
