"""The tolerance of bfloat16 follows from the roundings of the program itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.mean import Mean
from jtrain.testing.case import build_case
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.rounding import UNIT, compare_in_bfloat16, measure_spread
from jtrain.testing.row_sums import make_sums

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


def test_the_spread_is_that_of_independent_roundings():
    """Compare with the closed form: a rounding error, uniform in -u .. u, has variance u^2 / 3."""
    case = bfloat16_case(chain, 1)
    _, spread = measure_spread(make_sums(case.unplaced_loss(), True), case, case.batch)
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


def test_a_loss_in_float32_is_not_compared_in_bfloat16():
    not_compared: list[str] = []
    wide = lambda params, batch, rng: Mean.of((batch["x"] @ params["w"])[:, 0], batch["mask"])
    in_float32 = dataclasses.replace(bfloat16_case(wide, 4, 1), compute=None)
    assert compare_in_bfloat16(in_float32, not_compared) is None
    assert not_compared == []


def test_a_loss_that_rejects_narrow_parameters_is_not_compared():
    def convolved(params, batch, rng):
        out = jax.lax.conv(batch["x"][:, None], params["w"], (1,), "SAME")
        return Mean.of(out.mean((1, 2)), batch["mask"])

    not_compared: list[str] = []
    assert compare_in_bfloat16(bfloat16_case(convolved, 1, 1, 3), not_compared) is None
    assert "the loss does not take bfloat16 parameters: lax.conv" in not_compared[0]
    assert "float32, bfloat16" in not_compared[0]


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
