"""Rounding to 8 bits, products of it and their gradients, against a model in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from numpy.testing import assert_array_equal as assert_equal

from jtrain.train import eight_bit_products
from jtrain.train.eight_bit_products import Contraction, fp8_product, quantize_fp8

# bits of the fraction, exponent of the smallest normal number, largest number
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def round_to(x: np.ndarray, kind: tuple[int, int, float]) -> np.ndarray:
    """Return the nearest numbers of a type, ties to even, in float64; `x` is within its range."""
    fraction, smallest, largest = kind
    x = np.asarray(x, np.float64)
    assert np.abs(x).max(initial=0) <= largest
    exponent = np.floor(np.log2(np.where(x == 0, 1, np.abs(x))))
    quantum = 2.0 ** (np.maximum(exponent, smallest) - fraction)
    return np.round(x / quantum) * quantum  # numpy rounds ties to even


def quantized(x: np.ndarray, kind: tuple[int, int, float], axis: int | None) -> np.ndarray:
    """Return `x` rounded with a power of two as scale that is the largest to fit, by slices."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scale = 2.0 ** np.floor(np.log2(kind[2] / np.where(largest == 0, kind[2], largest)))
    return round_to(x * scale, kind) / scale


TYPES = {"e4m3": (eight_bit_products.E4M3, E4M3), "e5m2": (eight_bit_products.E5M2, E5M2)}


def numbers(seed: int = 0) -> np.ndarray:
    """Return rows of very different sizes; float32 16 64."""
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(16, 64)) * 2.0 ** draw.integers(-60, 60, (16, 1))).astype(np.float32)


def value(quantized) -> np.ndarray:
    return np.asarray(quantized.values, np.float64) * np.asarray(quantized.scale, np.float64)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "dims"), [("e4m3", None), ("e5m2", (1,)), ("e4m3", (0,))])
def test_rounds_as_the_model_in_numpy(kind, dims):
    dtype, model = TYPES[kind]
    x = numbers()
    found = value(quantize_fp8(jnp.asarray(x), dtype, dims))
    assert_equal(found, quantized(x, model, None if dims is None else dims[0]))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TYPES)
def test_rounds_every_number_of_the_type_to_itself_and_ties_to_even(kind):
    dtype, (fraction, smallest, largest) = TYPES[kind]
    top = int(np.log2(largest))
    grid = [
        (1 + i / 2**fraction) * 2.0**e for e in range(smallest, top + 1) for i in range(2**fraction)
    ]
    grid = np.array([v for v in grid if v <= largest])
    middles = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middles]).astype(np.float32)  # the largest makes the scale 1
    found = quantize_fp8(jnp.asarray(x), dtype, None)
    assert found.scale.item() == 1
    assert_equal(value(found)[: len(grid)], grid)
    assert_equal(value(found), round_to(x, TYPES[kind][1]))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(kind):
    dtype = TYPES[kind][0]
    x = jnp.asarray([[0, 0], [1, jnp.nan], [1, jnp.inf], [3e-39, -0.0], [3e38, 1.0]], jnp.float32)
    found = quantize_fp8(x, dtype, (1,))
    zeros, nan, inf, _, largest = value(found)
    assert_equal(zeros, [0, 0])
    assert found.scale[0].item() == 1
    assert np.isnan(nan[1])
    assert not np.isfinite(inf[1])
    assert np.isfinite(largest).all()
    assert largest[0] > 2.9e38


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
    q = quantized
    y = q(x, E4M3, 1) @ q(w, E4M3, 0)
    return y, q(g, E5M2, 1) @ q(w, E4M3, 1).T, x.T.astype(np.float64) @ g


def by_tensor(x, w, g):
    x, w, g = (quantized(v, kind, None) for v, kind in ((x, E4M3), (w, E4M3), (g, E5M2)))
    return x @ w, g @ w.T, x.T @ g


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("summed", [((1, 2), (1, 0)), ((0,), (0,))])
def test_any_dims_can_be_summed(summed):
    dims = Contraction(*summed)
    draw = np.random.default_rng(1)
    x = draw.normal(size=(3, 4, 5)).astype(np.float32)
    shape = {1: (7, 5), 2: (5, 4, 7)}[len(dims.x)] if dims.w != (0,) else (3, 7)
    w = draw.normal(size=shape).astype(np.float32)
    plain = lambda x, w: jax.lax.dot_general(x, w, (tuple(dims), ((), ())))
    want, pull = jax.vjp(plain, x, w)
    g = draw.normal(size=want.shape).astype(np.float32)
    for got, expected in zip(run("rows", x, w, g, dims), (want, *pull(g)), strict=True):
        assert got.shape == expected.shape
        # As above, and each sum has few terms: within the largest error of all terms.
        assert np.linalg.norm(got - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.thorough
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
def test_what_is_not_finite_stays_so(scaling):
    x, w, g = factors()
    x[2, 1] = np.nan
    assert not np.isfinite(run(scaling, x, w, g)[0][2]).any()
    x, w, g = factors()
    g[2, 1] = np.inf
    assert not np.isfinite(run(scaling, x, w, g)[1][2]).any()
