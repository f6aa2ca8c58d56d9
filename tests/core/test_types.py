"""Means and Terms: sums over rows that are divided only when read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.mean import Mean, Terms
from jtrain.core.model import Model


def drawn(shape, seed=0):
    random = np.random.default_rng(seed)
    values = (3 + random.exponential(size=shape)).astype(np.float32)
    mask = random.random(shape) < 0.7
    weights = random.exponential(size=shape).astype(np.float32)
    return values, mask, weights


def test_a_mean_is_the_same_under_any_split():
    values, mask, weights = map(jnp.asarray, drawn((6, 4)))
    parts = [Mean.of(*(x[i::3] for x in (values, mask, weights))) for i in range(3)]
    summed = jax.tree.map(lambda *sums: sum(sums), *parts)
    assert summed.value() == pytest.approx(Mean.of(values, mask, weights).value(), rel=1e-6)


@pytest.mark.parametrize("shape", [(31,), (16, 16), (32, 32), (12, 64), (8, 4, 8)], ids=str)
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


def test_weights_count_rows_more_often():
    values, mask = jnp.array([1.0, 2.0, 3.0]), jnp.array([True, True, False])
    assert Mean.of(values, mask, jnp.array([3.0, 1.0, 9.0])).value() == 5 / 4


def test_a_mean_of_nothing_is_nan_and_warns_of_nothing():
    assert np.isnan(Mean.of(jnp.ones(2), jnp.zeros(2, bool)).value())


def test_means_by_step_are_read_by_step():
    mean = Mean(jnp.array([1.0, 0.0]), jnp.array([2.0, 0.0]))
    np.testing.assert_array_equal(mean.value(), [0.5, np.nan])


def test_sixteen_bits_are_summed_in_thirty_two():
    many = Mean.of(jnp.ones(1000, jnp.bfloat16), jnp.ones(1000, bool))
    assert (many.total.dtype, float(many.total)) == (jnp.float32, 1000)


def test_a_shape_that_does_not_fit_is_named():
    with pytest.raises(Exception, match="mask"):
        Mean.of(jnp.ones((2, 3)), jnp.ones((2, 4), bool))


def test_terms_keep_each_mean_and_its_coefficient():
    one, two = Mean(jnp.float32(1), jnp.float32(2)), Mean(jnp.float32(3), jnp.float32(4))
    got = 2.0 * (one + 0.5 * two) + two
    assert isinstance(got, Terms)
    assert got.means == (one, two, two)
    assert got.coefficients == (2.0, 1.0, 1.0)


def test_a_program_can_be_compiled_for_a_model_that_names_its_dims():
    model = Model(lambda key: ({}, ()), lambda *_: (0, ()), {"weight": ("width",)})
    assert hash(model) == hash(Model(*model))
    assert jax.jit(lambda model: len(model.dims), static_argnums=0)(model) == 1
