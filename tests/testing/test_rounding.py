"""What bfloat16 is allowed follows from the roundings of the program itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.mean import Mean
from jtrain.testing.case import subject
from jtrain.testing.rounding import UNIT, in_bfloat16, spread_of
from jtrain.testing.row_sums import sums_of

ROWS, TURNS = 8, 48
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.uniform(1, 2, (ROWS, 4)).astype(np.float32)}


def of(loss, *shape):
    params = {"w": jnp.asarray(DRAW.uniform(0.5, 1, shape), jnp.float32)}
    return subject(loss, params, BATCH, optimizer=optax.sgd(0.1), compute=jnp.bfloat16)


def chain(params, batch, rng):
    """Of each row one number, multiplied 48 times."""
    x = batch["x"][:, 0].astype(jnp.bfloat16) * params["w"].astype(jnp.bfloat16)
    for turn in range(TURNS):
        x = x * jnp.bfloat16(1.25 if turn % 2 else 0.796875)
    return Mean.of(x.astype(jnp.float32), batch["mask"])


def test_the_spread_is_that_of_independent_roundings():
    """In closed form: a rounding, uniform in -u .. u, has the variance u^2 / 3."""
    given = of(chain, 1)
    _, spread = spread_of(sums_of(given.alone(), True), given, given.batch)
    # Each factor is exact, so that 48 products, two casts, and the first product round.
    one_row = UNIT * np.sqrt((TURNS + 2) / 3)
    assert one_row / np.sqrt(ROWS) / 2 < spread.loss < one_row * 1.5


def product(params, batch):
    return jnp.abs(batch["x"].astype(params["w"].dtype) @ params["w"])  # b k


def summed(params, batch, rng):
    """What XLA sums in float32 and rounds once."""
    return Mean.of(product(params, batch).astype(jnp.float32).mean(1), batch["mask"])


def running(params, batch, rng):
    """A sum that is rounded at each of 2,000 numbers, and stands still once it is large."""
    add = lambda total, column: (total + column, None)
    start = jnp.zeros(len(batch["x"]), params["w"].dtype)
    total = jax.lax.scan(add, start, product(params, batch).T)[0]
    return Mean.of(total.astype(jnp.float32), batch["mask"])


def test_rounding_once_a_value_is_accepted_and_what_stands_still_is_not():
    row = in_bfloat16(of(summed, 4, 2000), [])
    assert row.verdict == "ok"
    assert 1e-5 < row.apart.gradient.by < 0.01
    row = in_bfloat16(of(running, 4, 2000), [])
    assert (row.verdict, row.cause) == ("FAILS", "rounding in bfloat16")
    assert "a sum that stays in bfloat16" in row.why


def test_where_nothing_is_narrow_it_says_so():
    left: list[str] = []
    wide = lambda params, batch, rng: Mean.of((batch["x"] @ params["w"])[:, 0], batch["mask"])
    assert in_bfloat16(of(wide, 4, 1), left) is None
    assert "bfloat16 was not compared" in left[0]
    assert "Cast them where they enter the model" in left[0]


def test_a_loss_in_float32_is_told_nothing_about_bfloat16():
    left: list[str] = []
    wide = lambda params, batch, rng: Mean.of((batch["x"] @ params["w"])[:, 0], batch["mask"])
    in_float32 = dataclasses.replace(of(wide, 4, 1), compute=None)
    assert in_bfloat16(in_float32, left) is None
    assert left == []


def test_a_loss_that_takes_no_narrow_parameters_is_no_fault():
    def convolved(params, batch, rng):
        out = jax.lax.conv(batch["x"][:, None], params["w"], (1,), "SAME")
        return Mean.of(out.mean((1, 2)), batch["mask"])

    left: list[str] = []
    assert in_bfloat16(of(convolved, 1, 1, 3), left) is None
    assert "the loss does not take its parameters so: lax.conv" in left[0]
    assert "float32, bfloat16" in left[0]
