"""A function in float64 draws what it draws in float32, and is otherwise exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.testing.float64 import wide, widened


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
    # In the tail float32 has three digits less of it.
    assert_close(drawn, normal(key), 1e-5)


def program(x, w, cast):
    """Loops, branches, a table that is looked up, products, and the gradient of it all."""

    def loss(w):
        rows = w[jnp.array([0, 2, 2])]
        y = jax.nn.softmax(cast(cast(x) @ rows.T))
        last, seen = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), y[0], y)
        start = jax.lax.stop_gradient(seen.max(0))
        y = jax.lax.while_loop(lambda c: c.sum() < 2, lambda c: c * 1.5, start) + last
        return jax.lax.cond(y[0] > 0, lambda: jnp.exp(y).sum(), lambda: y.sum())

    return jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(w)


def test_is_as_exact_as_float64_though_it_casts_to_float32():
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((4, 3), (3, 3)))
    got = in_double(lambda x, w: program(x, w, lambda y: y.astype(jnp.float32)), x, w)
    with jax.enable_x64(True):  # the same without the casts
        want = jax.device_get(program(*wide((x, w)), lambda y: y))
    assert_close(got[0], want[0], 1e-14)
    assert_close(got[1], want[1], 1e-12)


def test_what_cannot_be_looked_into_is_refused():
    there = jax.ShapeDtypeStruct((3,), jnp.float32)
    hidden = lambda x: jax.pure_callback(lambda x: x, there, x)
    with pytest.raises(NotImplementedError, match="pure_callback"):
        in_double(hidden, jnp.ones(3))
