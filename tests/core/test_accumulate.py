"""Sums over microbatches: which rows, in which type, and what a derivative of the sum is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from line import line, points, squared

from jtrain.core.accumulate import accumulate
from jtrain.core.gradient import LossGradient, make_value_fn


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_every_row_is_summed_once(microbatches, unroll):
    square = lambda batch: {
        "x": (batch["x"] ** 2).sum(0),
        "rows": len(batch["x"]) + 0 * batch["row"].sum(),
    }
    batch = points(8)
    got = jax.jit(accumulate(square, microbatches, unroll=unroll))(batch)
    assert_close(got["x"], (batch["x"].astype(np.float64) ** 2).sum(0), 1e-6)
    assert got["rows"] == 8


def test_a_slice_takes_every_nth_row_so_that_rows_stay_on_their_device():
    """A slice whose rows are 0, 2, 4, 6 sums to 12, the other to 16."""
    product = lambda batch: jnp.log(batch["row"].sum().astype(jnp.float32))
    got = jax.jit(accumulate(product, 2))(points(8))
    assert float(got) == pytest.approx(np.log(12) + np.log(16))


def test_sixteen_bits_are_summed_in_thirty_two():
    ones = lambda batch: batch["x"].astype(jnp.bfloat16).sum().astype(jnp.bfloat16)
    batch = {"x": jnp.ones(1024)}
    got = jax.jit(accumulate(ones, 512))(batch)
    assert (got.dtype, float(got)) == (jnp.float32, 1024)  # in bfloat16 256 + 1 is 256


def test_the_derivative_of_the_value_is_the_gradient_given_with_it():
    batch = {name: jnp.asarray(x) for name, x in points(8).items()}
    mean = lambda params: squared(params, batch, None).total / 8
    gradient = lambda params: LossGradient(*jax.value_and_grad(mean)(params), {}, ())
    value = make_value_fn(gradient)
    assert float(value(line())) == pytest.approx(float(mean(line())), rel=1e-6)
    got, want = jax.grad(lambda p: 3 * value(p))(line()), jax.grad(mean)(line())
    assert distance(got, jax.tree.map(lambda leaf: 3 * leaf, want)) < 1e-6
