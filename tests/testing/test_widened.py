"""A function in float64 draws what it draws in float32, and is otherwise exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.testing.widened import wide, widened


def in_double(fn, *args):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(widened(fn))(*wide(args)))


def test_draws_are_those_of_float32():
    key = jax.random.key(3)
    kept = lambda key: jax.random.bernoulli(key, 0.3, (100,))
    np.testing.assert_array_equal(in_double(kept, key), kept(key))
    normal = lambda key: jax.random.normal(key, (100,))
    drawn = in_double(normal, key)
    assert drawn.dtype == np.float64
    np.testing.assert_allclose(drawn, normal(key), rtol=3e-6, atol=1e-7)


def program(x, w):
    """Loops, branches, a table that is looked up, casts to float32, products and their gradient."""

    def loss(w):
        rows = w[jnp.array([0, 2, 2])]
        y = jax.nn.softmax((x.astype(jnp.float32) @ rows.T).astype(jnp.float32))
        y, _ = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), y[0], y)
        y = jax.lax.while_loop(lambda c: c.sum() < 2, lambda c: c * 1.5, y)
        return jax.lax.cond(y[0] > 0, lambda: jnp.exp(y).sum(), lambda: y.sum())

    return jax.jit(jax.value_and_grad(jax.checkpoint(loss), allow_int=False))(w)


def test_is_as_exact_as_float64():
    """Against differences quotients of itself, and numpy's own float64 for a plain product."""
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(4, 3)).astype("f"), draw.normal(size=(3, 3)).astype("f")
    product = in_double(lambda x, w: x @ w, x, w)
    np.testing.assert_allclose(product, x.astype("d") @ w.astype("d"), rtol=1e-14)


def test_what_cannot_be_looked_into_is_refused():
    there = jax.ShapeDtypeStruct((3,), jnp.float32)
    hidden = lambda x: jax.pure_callback(lambda x: x, there, x)
    with pytest.raises(NotImplementedError, match="pure_callback"):
        in_double(hidden, jnp.ones(3))
