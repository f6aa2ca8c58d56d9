"""Tokens drawn as often as their chances say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.generate import draw

CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
DRAWS = 4000


def _count(temperature, top_p, top_k):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(CHANCES, jnp.float32)), (DRAWS, 5))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    tokens = draw(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)
    return jnp.bincount(tokens, length=5)


COUNT = jax.jit(_count, static_argnums=2)


def shares(temperature=1.0, top_p=1.0, top_k=0):
    counts = COUNT(jnp.float32(temperature), jnp.float32(top_p), top_k)
    return np.asarray(counts) / DRAWS


def of(*kept, power=1.0):
    """Return the probabilities of these tokens."""
    chances = np.where(np.isin(np.arange(5), kept), CHANCES, 0) ** power
    return np.where(np.isin(np.arange(5), kept), chances / chances.sum(), 0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, of(0, 1, 2, 3, 4)),
        ({"temperature": 0.5}, of(0, 1, 2, 3, 4, power=2)),
        ({"temperature": 0.0}, of(1)),
        ({"top_p": 0.6}, of(1, 3)),  # 0.40 + 0.25 reaches it
        ({"top_p": 0.66}, of(1, 3, 4)),
        ({"top_p": 1e-6}, of(1)),
        ({"top_k": 3}, of(1, 3, 4)),
        ({"top_k": 3, "top_p": 0.7}, of(1, 3)),  # of 0.85: 0.47 + 0.29
        ({"top_k": 99}, of(0, 1, 2, 3, 4)),
    ],
    ids=str,
)
def test_draws_as_often_as_the_chances_say(how, expected):
    # 4000 draws: 4 standard errors are 0.032.
    got = shares(**how)
    assert_close(got, expected, 0.032, terms=1)
    assert (got[expected == 0] == 0).all()


def test_a_row_draws_by_its_own_key():
    logits, keys = jnp.zeros((6, 50)), jax.random.split(jax.random.key(1), 6)
    whole, part = jax.jit(lambda x, k: (draw(x, k), draw(x[2:4], k[2:4])))(logits, keys)
    np.testing.assert_array_equal(part, whole[2:4])
    assert len(set(whole.tolist())) > 1


def test_half_precision_draws_as_whole_does():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((8, 30)), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1), 8)
    both = lambda x: (draw(x, keys, top_p=0.9), draw(x.astype(jnp.float32), keys, top_p=0.9))
    got, want = jax.jit(both)(logits)
    np.testing.assert_array_equal(got, want)
