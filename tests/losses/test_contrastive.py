"""Two towers: the formula, the mask, the temperature, and rows on many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.losses.contrastive import contrastive

DRAW = np.random.default_rng(0)
LEFT, RIGHT = jnp.asarray(DRAW.standard_normal((2, 16, 6)), jnp.float32)
MASK = jnp.arange(16) % 5 != 3


def in_numpy(left, right, log_scale):
    """Compute the pseudo-code of the paper over the given rows."""
    left, right = (np.asarray(x, np.float64) for x in (left, right))
    left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
    logits = left @ right.T * np.exp(log_scale)
    own = np.arange(len(left))
    rows = np.log(np.exp(logits).sum(1)) - logits[own, own]
    columns = np.log(np.exp(logits).sum(0)) - logits[own, own]
    return (rows.mean() + columns.mean()) / 2, (logits.argmax(1) == own).mean()


@pytest.mark.thorough
def test_gives_the_formula_over_the_rows_that_count():
    spoilt = [jnp.where(MASK[:, None], x, jnp.nan) for x in (LEFT, RIGHT)]
    value, metrics = jax.jit(contrastive)(*spoilt, jnp.float32(1.2), MASK)
    want, hits = in_numpy(LEFT[MASK], RIGHT[MASK], 1.2)
    assert_close(value.value(), want, 1e-6)
    assert_close(metrics["accuracy"].value(), hits, 1e-6)


@pytest.mark.thorough
def test_the_gradient_is_the_slope_and_hidden_rows_have_none():
    mean = lambda left, s: contrastive(left, RIGHT, s, MASK)[0].total / MASK.sum()
    spoilt = jnp.where(MASK[:, None], LEFT, jnp.nan)
    grad, by_scale = jax.jit(jax.grad(mean, (0, 1)))(spoilt, jnp.float32(1.2))
    assert not grad[~MASK].any()
    slope = lambda f: (f(1e-5) - f(-1e-5)) / 2e-5
    assert_close(by_scale, slope(lambda e: in_numpy(LEFT[MASK], RIGHT[MASK], 1.2 + e)[0]), 1e-4)
    way = np.float64(RIGHT[MASK])
    moved = lambda e: in_numpy(np.float64(LEFT[MASK]) + e * way, RIGHT[MASK], 1.2)[0]
    along = grad[MASK] * way
    assert_close(along.sum(), slope(moved), 1e-6, terms=np.abs(along).sum())


@pytest.mark.thorough
def test_a_scale_beyond_a_hundred_is_a_hundred():
    run = jax.jit(contrastive)
    steep, bound = (run(LEFT, RIGHT, jnp.float32(s), MASK)[0] for s in (9, np.log(100)))
    assert_close(steep.total, bound.total, 1e-5)
    of = lambda s: contrastive(LEFT, RIGHT, s, MASK)[0].total
    assert jax.jit(jax.grad(of))(jnp.float32(9)) == 0
