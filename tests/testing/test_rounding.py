"""Rounding: float64 judges with the draws of float32; bfloat16 has the program's tolerance."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

from jtrain.core.mean import Mean
from jtrain.testing.bfloat16 import UNIT, compare_in_bfloat16, measure_spread
from jtrain.testing.case import build_case
from jtrain.testing.float64 import to_float64, widen
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.sums import make_sums


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


ROWS, TURNS = 8, 48
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.uniform(1, 2, (ROWS, 4)).astype(np.float32)}


def bfloat16_case(loss, *shape):
    params = {"w": jnp.asarray(DRAW.uniform(0.5, 1, shape), jnp.float32)}
    return build_case(loss, params, BATCH, optimizer=optax.sgd(0.1), compute=jnp.bfloat16)


def chain(params, batch, rng):
    """Multiply one number of each row 48 times."""
    x = batch["x"][:, 0].astype(jnp.bfloat16) * params["w"].astype(jnp.bfloat16)
    for turn in range(TURNS):
        x = x * jnp.bfloat16(1.25 if turn % 2 else 0.796875)
    return Mean.of(x.astype(jnp.float32), batch["mask"])


@pytest.mark.thorough
def test_the_spread_is_that_of_independent_roundings():
    """Compare with the closed form: a rounding error, uniform in -u .. u, has variance u^2 / 3."""
    case = bfloat16_case(chain, 1)
    _, spread = measure_spread(make_sums(case.terms()), case, case.batch)
    # The factors are exact, so the roundings are 48 products, two casts and the first product.
    one_row = UNIT * np.sqrt((TURNS + 2) / 3)
    assert one_row / np.sqrt(ROWS) / 2 < spread.loss < one_row * 1.5


def product(params, batch):
    return jnp.abs(batch["x"].astype(params["w"].dtype) @ params["w"])  # b k


def summed(params, batch, rng):
    """Return a mean that XLA sums in float32 and rounds once."""
    return Mean.of(product(params, batch).astype(jnp.float32).mean(1), batch["mask"])


def running(params, batch, rng):
    """Return a sum that is rounded at each of 2,000 numbers and stops growing once it is large."""
    add = lambda total, column: (total + column, None)
    start = jnp.zeros(len(batch["x"]), params["w"].dtype)
    total = jax.lax.scan(add, start, product(params, batch).T)[0]
    return Mean.of(total.astype(jnp.float32), batch["mask"])


@pytest.mark.thorough
def test_rounding_once_per_value_is_accepted_and_a_stagnating_sum_is_not():
    row = compare_in_bfloat16(bfloat16_case(summed, 4, 2000), [])
    assert row.verdict == "ok"
    assert 1e-5 < row.distances.gradient.by < 0.01
    row = compare_in_bfloat16(bfloat16_case(running, 4, 2000), [])
    assert (row.verdict, row.cause) == ("FAILS", "rounding in bfloat16")
    assert "a sum that stays in bfloat16" in row.why


def test_a_loss_without_narrow_operations_is_reported():
    not_compared: list[str] = []
    wide = lambda params, batch, rng: Mean.of((batch["x"] @ params["w"])[:, 0], batch["mask"])
    assert compare_in_bfloat16(bfloat16_case(wide, 4, 1), not_compared) is None
    assert "bfloat16 was not compared" in not_compared[0]
    assert "Cast them where they enter the model" in not_compared[0]


def test_a_loss_that_rejects_narrow_parameters_is_not_compared():
    def convolved(params, batch, rng):
        out = jax.lax.conv(batch["x"][:, None], params["w"], (1,), "SAME")
        return Mean.of(out.mean((1, 2)), batch["mask"])

    not_compared: list[str] = []
    assert compare_in_bfloat16(bfloat16_case(convolved, 1, 1, 3), not_compared) is None
    assert "the loss does not take bfloat16 parameters: lax.conv" in not_compared[0]
    assert "float32, bfloat16" in not_compared[0]


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
