"""Products in 8 bits and their gradients, against a model in numpy."""

import functools

import eight_bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.train.quantize.products import Contraction, fp8_product, int8_product

E4M3, E5M2 = eight_bits.E4M3, eight_bits.E5M2
ROWS, INPUTS, OUTPUTS = 24, 16, 40
# float32 sums of up to 40 products: each addition rounds to 2^-24 of the sum.
EXACT = OUTPUTS * 2.0**-23


def factors(seed: int = 0):
    """Return x, w and an incoming gradient, with outliers in some rows; float32."""
    draw = np.random.default_rng(seed)
    shapes = (ROWS, INPUTS), (INPUTS, OUTPUTS), (ROWS, OUTPUTS)
    x, w, g = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    x[3] *= 1e4
    g[5] *= 1e-6
    g[6] = 0
    return x, w, g


def run(scaling: str, x, w, g, dims=Contraction((1,), (0,))):
    @jax.jit
    def product(x, w, g):
        y, pull = jax.vjp(lambda x, w: fp8_product(x, w, dims, scaling), x, w)
        return y, *pull(g)

    return product(x, w, g)


def by_rows(x, w, g):
    q = functools.partial(eight_bits.quantized)
    y = q(x, E4M3, 1) @ q(w, E4M3, 0)
    return y, q(g, E5M2, 1) @ q(w, E4M3, 1).T, x.T.astype(np.float64) @ g


def by_tensor(x, w, g):
    x, w, g = (eight_bits.quantized(v, kind, None) for v, kind in ((x, E4M3), (w, E4M3), (g, E5M2)))
    return x @ w, g @ w.T, x.T @ g


@pytest.mark.parametrize(("scaling", "model"), [("rows", by_rows), ("tensor", by_tensor)])
def test_product_and_gradients_are_those_of_the_model_in_numpy(scaling, model):
    x, w, g = factors()
    found, want = run(scaling, x, w, g), model(x, w, g)
    for name, got, expected in zip(("y", "dx", "dw"), found, want, strict=True):
        assert_close(got, expected, EXACT, says=name)
    # In rows of its own size a small row is as exact as a large one.
    if scaling == "rows":
        assert_close(found[0][4], want[0][4], EXACT)
        assert_close(found[1][5], want[1][5], EXACT)


@pytest.mark.parametrize("scaling", ["rows", "tensor"])
def test_rounding_is_seen_and_is_no_larger_than_the_types_round(scaling):
    x, w, g = factors()
    x[3] /= 1e4
    plain = x @ w, g @ w.T, x.T @ g
    for name, got, expected in zip(("y", "dx", "dw"), run(scaling, x, w, g), plain, strict=True):
        got, expected = np.asarray(got, np.float64), expected.astype(np.float64)
        off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        if (scaling, name) == ("rows", "dw"):
            assert off < EXACT  # not quantized
        else:  # half a step is 2^-4 of an e4m3 number and 2^-3 of an e5m2
            assert 1e-3 < off < (2**-4 + 2**-4 if name == "y" else 2**-3 + 2**-4), name


@pytest.mark.parametrize("scaling", ["rows", "tensor"])
@pytest.mark.parametrize("summed", [((2,), (1,)), ((1, 2), (1, 0)), ((0,), (0,))])
def test_any_dims_can_be_summed(scaling, summed):
    dims = Contraction(*summed)
    draw = np.random.default_rng(1)
    x = draw.normal(size=(3, 4, 5)).astype(np.float32)
    shape = {1: (7, 5), 2: (5, 4, 7)}[len(dims.x)] if dims.w != (0,) else (3, 7)
    w = draw.normal(size=shape).astype(np.float32)
    plain = lambda x, w: jax.lax.dot_general(x, w, (tuple(dims), ((), ())))
    want, pull = jax.vjp(plain, x, w)
    g = draw.normal(size=want.shape).astype(np.float32)
    for got, expected in zip(run(scaling, x, w, g, dims), (want, *pull(g)), strict=True):
        assert got.shape == expected.shape
        # As above, and each sum has few terms: within the largest error of all terms.
        assert np.linalg.norm(got - expected) < 0.2 * np.linalg.norm(expected)


def test_a_row_is_the_same_beside_any_other_rows():
    x, w, g = factors()
    y, dx, _ = run("rows", x, w, g)
    for part in (slice(0, 5), slice(5, None)):
        some, grads, _ = run("rows", x[part], w, g[part])
        assert_close(some, y[part], EXACT)
        assert_close(grads, dx[part], EXACT)
    # Scaled as a whole, the outlier of row 3 costs the other rows their small numbers.
    alone, *_ = run("tensor", x[5:], w, g[5:])
    beside, *_ = run("tensor", x, w, g)
    assert np.abs(np.asarray(alone - beside[5:])).max() > 0.01


@pytest.mark.parametrize("scaling", ["rows", "tensor"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(scaling, bad):
    x, w, g = factors()
    x[2, 1] = bad
    assert not np.isfinite(run(scaling, x, w, g)[0][2]).any()
    x, w, g = factors()
    g[2, 1] = bad
    assert not np.isfinite(run(scaling, x, w, g)[1][2]).any()


@pytest.mark.parametrize("scaling", ["rows", "tensor"])
def test_the_largest_and_smallest_numbers_of_bfloat16_do_not_overflow(scaling):
    x = jnp.full((16, 16), 3.0e38, jnp.bfloat16)
    w = jnp.full((16, 16), 1e-30, jnp.bfloat16)
    y, dx, dw = run(scaling, x, w, jnp.full((16, 16), 1e-38, jnp.bfloat16))
    for array in (y, dx, dw):
        assert array.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert_close(y.astype(jnp.float32), 16 * 3.0e8, 2**-3)


def test_factors_of_zeros_give_zeros():
    zeros = np.zeros((16, 16), np.float32)
    for scaling in ("rows", "tensor"):
        for array in run(scaling, zeros, zeros, zeros):
            assert not np.asarray(array).any()


def test_int8_is_the_product_of_its_integers():
    x, w, _ = factors()
    step = lambda v, axis: np.abs(v).max(axis, keepdims=True).astype(np.float64) / 127
    left, right = np.round(x / step(x, 1)), np.round(w / step(w, 0))
    y = int8_product(jnp.asarray(x), jnp.asarray(w), Contraction((1,), (0,)))
    # A quotient in the middle of two integers may round either way in float32.
    assert_close(y[4:], ((left @ right) * step(x, 1) * step(w, 0))[4:], 2 / 127**2 + EXACT)
    assert np.linalg.norm(y[4:] - x[4:] @ w) < 0.02 * np.linalg.norm(x[4:] @ w)
