"""Dropout by the keys of rows."""

import jax
import jax.numpy as jnp
import numpy as np
from comparison import assert_close

from jtrain.models.layers.dropout import drop

KEYS = jax.random.split(jax.random.key(0), 4)
X = jnp.ones((4, 50, 40))


def test_keeps_the_mean_and_drops_the_rate():
    y = np.asarray(jax.jit(lambda x: drop(x, 0.25, KEYS))(X))
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    dropped = (y == 0).mean((1, 2))  # of 2000 a row: 4 standard errors are 0.04
    assert_close(dropped, 0.25, 0.04, terms=1)


def test_sites_and_rows_draw_apart():
    first, second = (drop(X, 0.5, KEYS, site=site) for site in (0, 1))
    assert 0.4 < (first == second).mean() < 0.6
    assert 0.4 < (first[0] == first[1]).mean() < 0.6


def test_is_the_identity_without_keys_or_rate():
    assert drop(X, 0.5, None) is X
    assert drop(X, 0.0, KEYS) is X
