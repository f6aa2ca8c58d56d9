"""Rounding: float64 judges with the draws of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

from jtrain.core.mean import Mean
from jtrain.testing.case import build_case
from jtrain.testing.float64 import to_float64, widen
from jtrain.testing.loss_checks import compare_loss


def in_double(fn, *args):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(widen(fn))(*to_float64(args)))


def test_draws_are_those_of_float32():
    key = jax.random.key(3)
    flips = lambda key: jax.random.bernoulli(key, 0.3, (100,))
    np.testing.assert_array_equal(in_double(flips, key), flips(key))
    normal = lambda key: jax.random.normal(key, (100,))
    drawn = in_double(normal, key)
    assert drawn.dtype == np.float64
    # In the tail float32 has three digits less.
    assert_close(drawn, normal(key), 1e-5)


def program(x, w, cast):
    """Return value and gradient of a program with loops, branches, a table and products."""

    def loss(w):
        rows = w[jnp.array([0, 2, 2])]
        y = jax.nn.softmax(cast(cast(x) @ rows.T))
        last, states = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), y[0], y)
        start = jax.lax.stop_gradient(states.max(0))
        y = jax.lax.while_loop(lambda c: c.sum() < 2, lambda c: c * 1.5, start) + last
        return jax.lax.cond(y[0] > 0, lambda: jnp.exp(y).sum(), lambda: y.sum())

    return jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(w)


@pytest.mark.thorough
def test_casts_to_float32_do_not_round():
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((4, 3), (3, 3)))
    actual = in_double(lambda x, w: program(x, w, lambda y: y.astype(jnp.float32)), x, w)
    with jax.enable_x64(True):  # the same without the casts
        expected = jax.device_get(program(*to_float64((x, w)), lambda y: y))
    assert_close(actual[0], expected[0], 1e-14)
    assert_close(actual[1], expected[1], 1e-12)


def test_complex_numbers_are_computed_in_double():
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(4, 8)) + 1j * draw.normal(size=(4, 8)), jnp.complex64)
    power = lambda x: jnp.square(jnp.abs(jnp.fft.fft(x) @ x.T)).sum()
    expected = np.square(np.abs(np.fft.fft(np.complex128(x)) @ np.complex128(x).T)).sum()
    assert_close(in_double(power, x), expected, 1e-14)


def test_an_opaque_callback_raises():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    hidden = lambda x: jax.pure_callback(lambda x: x, shape, x)
    with pytest.raises(NotImplementedError, match="pure_callback"):
        in_double(hidden, jnp.ones(3))


@pytest.mark.thorough
def test_large_sums_that_cancel_are_named_and_no_fault():
    def cancelling(params, batch, rng):
        del rng
        each, mask = (batch["x"] @ params["w"])[:, 0] ** 2 + 1e6, batch["mask"]
        return Mean(jnp.sum(each * mask) - 1e6 * jnp.sum(mask), jnp.sum(mask))

    params = {"w": jnp.ones((4, 1))}
    batch = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    case = build_case(cancelling, params, batch, optimizer=optax.sgd(0.1))
    rows = list(compare_loss(case))
    assert {row.verdict for row in rows} <= {"ok", "rounding", "named"}
    assert {row.cause for row in rows if row.verdict == "named"} == {"cancellation"}
