"""The loss of the equation of heat."""

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.heat import CONDUCTIVITY, ENDS, START, exact, heat
from jtrain.inspect.eject.pieces.sums import sum_rows


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on."""
    del key
    at = lambda x, t: heat(params, x, t)
    slope = jax.grad(at, 0)
    leaves = lambda x, t: jax.grad(at, 1)(x, t) - CONDUCTIVITY * jax.grad(slope)(x, t)
    x, t, nought = batch["x"], batch["t"], jnp.zeros_like(batch["x"])
    mean = lambda error: sum_rows(jnp.square(error), batch["mask"])
    begins = jax.vmap(at)(x, nought) - exact(x, nought)
    terms = [
        (1.0, *mean(jax.vmap(leaves)(x, t))),
        (START, *mean(begins)),
        (ENDS, *mean(jax.vmap(at)(nought, t))),
        (ENDS, *mean(jax.vmap(at)(nought + 1, t))),
    ]
    return terms, extra
