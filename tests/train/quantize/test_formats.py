"""Rounding to 8 bits, against a model in numpy."""

import eight_bits
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal as assert_equal

from jtrain.train.quantize.formats import E4M3, E5M2, quantize_fp8, quantize_int8

TYPES = {"e4m3": (E4M3, eight_bits.E4M3), "e5m2": (E5M2, eight_bits.E5M2)}


def numbers(seed: int = 0) -> np.ndarray:
    """Return rows of very different sizes; float32 16 64."""
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(16, 64)) * 2.0 ** draw.integers(-60, 60, (16, 1))).astype(np.float32)


def value(quantized) -> np.ndarray:
    return np.asarray(quantized.values, np.float64) * np.asarray(quantized.scale, np.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dims", [None, (1,), (0,)])
def test_rounds_as_the_model_in_numpy(kind, dims):
    dtype, model = TYPES[kind]
    x = numbers()
    found = value(quantize_fp8(jnp.asarray(x), dtype, dims))
    assert_equal(found, eight_bits.quantized(x, model, None if dims is None else dims[0]))


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
    assert_equal(value(found), eight_bits.round_to(x, TYPES[kind][1]))


@pytest.mark.parametrize("kind", TYPES)
def test_the_scale_is_the_largest_power_of_two_that_fits(kind):
    dtype, (*_, largest) = TYPES[kind]
    just = np.float32(largest) * 2.0 ** np.arange(-100, 90, 7, dtype=np.float32)
    for x, factor in ((just, 1), (np.nextafter(just, np.float32(np.inf)), 2)):
        found = quantize_fp8(jnp.asarray(x)[:, None], dtype, (1,))
        assert_equal(np.asarray(found.scale)[:, 0], factor * just / np.float32(largest))
        assert np.isfinite(np.asarray(found.values, np.float32)).all()


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


@pytest.mark.parametrize("dims", [None, (1,), (0,)])
def test_int8_is_within_half_a_step(dims):
    x = numbers(1)
    found = quantize_int8(jnp.asarray(x), dims)
    step = np.abs(x).max(None if dims is None else dims[0], keepdims=True) / 127
    # Half a step, and the float32 roundings of the quotient and the scale.
    assert (np.abs(value(found) - x) <= step * (0.5 + 127 * 2.0**-22)).all()
    assert np.abs(np.asarray(found.values, np.int32)).max() == 127
    assert quantize_int8(jnp.zeros((2, 3)), dims).values.max() == 0
