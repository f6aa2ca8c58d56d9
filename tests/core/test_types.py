"""Means, Terms, trees and rows: sums divided only when read, leaves by name, draws by place."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core import pytree
from jtrain.core.mean import Mean, Terms
from jtrain.core.rows import row_keys, with_rows
from jtrain.errors import LossError


def drawn(shape, seed=0):
    random = np.random.default_rng(seed)
    values = (3 + random.exponential(size=shape)).astype(np.float32)
    mask = random.random(shape) < 0.7
    weights = random.exponential(size=shape).astype(np.float32)
    return values, mask, weights


@pytest.mark.parametrize("shape", [(31,), (32, 32), (8, 4, 8)], ids=str)
def test_a_mean_is_numpys_in_float64(shape):
    """To 5e-7: summed in one go, 32 x 32 numbers are off by up to 3e-6."""
    for seed in range(10):
        values, mask, weights = drawn(shape, seed)
        want = np.average(values.astype(np.float64), weights=weights.astype(np.float64) * mask)
        got = jax.jit(lambda v, m, w: Mean.of(jnp.log(jnp.exp(v)), m, w))(values, mask, weights)
        assert got.value() == pytest.approx(want, rel=5e-7)


def test_what_the_mask_hides_may_be_anything():
    mean = Mean.of(jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([True, False, False]))
    assert mean.value() == 1.0


def test_a_mean_of_nothing_is_nan_and_warns_of_nothing():
    assert np.isnan(Mean.of(jnp.ones(2), jnp.zeros(2, bool)).value())


def test_means_by_step_are_read_by_step():
    mean = Mean(jnp.array([1.0, 0.0]), jnp.array([2.0, 0.0]))
    np.testing.assert_array_equal(mean.value(), [0.5, np.nan])


@pytest.mark.parametrize(
    ("values", "mask", "weights"),
    [
        ((2, 3), (2,), None),
        ((2, 3), (2, 1), None),  # NumPy would count each row once and sum three of its values
        ((2, 3), (2, 3), (2, 1)),
    ],
)
def test_values_mask_and_weights_have_one_shape(values, mask, weights):
    of = inspect.unwrap(Mean.of)  # as users run it, without the type checks of these tests
    weights = None if weights is None else jnp.ones(weights)
    with pytest.raises(LossError, match=r"jt\.Mean\.of got values .* Give both one shape"):
        of(Mean, jnp.ones(values), jnp.ones(mask, bool), weights)


def test_complex_values_have_no_mean():
    with pytest.raises(LossError, match=r"complex values. Give real ones: jnp\.abs\(values\)"):
        Mean.of(jnp.array([1 + 1j, 2]), jnp.array([True, True]))
    assert Mean.of(jnp.abs(jnp.array([1 + 1j, 2])) ** 2, jnp.array([True, True])).value() == 3


def test_terms_keep_each_mean_and_its_coefficient():
    one, two = Mean(jnp.float32(1), jnp.float32(2)), Mean(jnp.float32(3), jnp.float32(4))
    got = 2.0 * (one + 0.5 * two) + two
    assert isinstance(got, Terms)
    assert got.means == (one, two, two)
    assert got.coefficients == (2.0, 1.0, 1.0)


def test_the_norm_is_over_all_leaves():
    some = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0, jnp.bfloat16)}
    assert float(pytree.norm(some)) == 5.0
    assert pytree.norm({}) == 0


def test_the_norm_of_complex_numbers_is_of_their_modulus():
    some = {"a": jnp.array([3 + 4j, 12j], jnp.complex64), "b": jnp.float32(1)}
    assert float(pytree.norm(some)) == pytest.approx(170**0.5)


@pytest.mark.thorough
def test_the_norm_of_sixteen_bits_is_summed_in_thirty_two():
    assert float(pytree.norm(jnp.ones(10_000, jnp.bfloat16))) == pytest.approx(100, rel=1e-6)
    assert np.isfinite(float(pytree.norm(jnp.full(4, 300.0, jnp.float16))))


def test_row_and_mask_are_those_of_a_full_batch_where_there_are_none():
    got = with_rows({"x": jnp.ones((3, 2))})
    assert (got["row"].tolist(), got["mask"].tolist()) == ([0, 1, 2], [True] * 3)
    kept = with_rows({"x": jnp.ones(2), "mask": jnp.array([True, False])})
    assert kept["mask"].tolist() == [True, False]


def test_arrays_of_other_rows_are_named():
    for other in (jnp.float32(0.5), jnp.ones(2)):
        with pytest.raises(LossError, match=r"'alpha': \((2,)?\), 'x': \(3, 2\)"):
            with_rows({"x": jnp.ones((3, 2)), "alpha": other})
    assert len(with_rows({"x": jnp.ones((3, 2)), "alpha": jnp.full(3, 0.5)})["mask"]) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "partitionable", "x64"),
    [("threefry2x32", False, False), ("rbg", True, True), ("unsafe_rbg", True, False)],
)
def test_a_row_draws_the_same_by_every_generator(impl, partitionable, x64):
    with jax.enable_x64(x64), jax.threefry_partitionable(partitionable):
        key, rows, some = jax.random.key(5, impl=impl), np.arange(8), np.array([2, 3] * 4)
        normal = jax.vmap(lambda key: jax.random.normal(key, (3,)))
        draw = jax.jit(lambda key, rows: normal(row_keys(key, {"row": rows})))
        whole = np.asarray(draw(key, rows))
        np.testing.assert_array_equal(draw(key, rows[::-1]), whole[::-1])
        np.testing.assert_array_equal(draw(key, some), whole[some])
        other = np.asarray(draw(jax.random.key(6, impl=impl), rows))
        assert len(np.unique([whole, other])) == 48
