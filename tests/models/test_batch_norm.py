"""Batch norm against float64 and autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.mean import Mean
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.layers.batch_norm import EPSILON, BatchNorm, standardize_rows

pytestmark = pytest.mark.usefixtures("strict_dtypes")
DRAW = np.random.default_rng(0)
X = (3 + 2 * DRAW.standard_normal((6, 4, 5, 3))).astype(np.float32)
MASK = np.array([True, True, False, True, False, True])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = BatchNorm(3)
        self.norm.scale.set_value(jnp.array([1.0, 2.0, 0.5]))
        self.norm.bias.set_value(jnp.array([0.0, -1.0, 3.0]))

    def __call__(self, x, mask=None):
        return self.norm(x, mask)


@pytest.fixture(scope="module", name="net")
def _net():
    model = from_nnx(Net)
    return jax.jit(model.apply, static_argnames="train"), *model.init(jax.random.key(0))


def test_normalises_by_the_rows_that_are_shown(net):
    apply, params, extra = net
    y, _ = apply(params, extra, X, MASK, train=True)
    seen = X[MASK].astype(np.float64)
    mean, var = seen.mean((0, 1, 2)), seen.var((0, 1, 2))
    want = (seen - mean) / np.sqrt(var + EPSILON) * [1.0, 2.0, 0.5] + [0.0, -1.0, 3.0]
    assert_close(y[MASK], want, 2e-6)


def test_running_statistics_come_back_as_means_of_the_rows(net):
    apply, params, extra = net
    _, after = apply(params, extra, X, MASK, train=True)
    seen = X[MASK].astype(np.float64)
    mean, var = after["norm"]["mean"], after["norm"]["var"]
    assert isinstance(mean, Mean)
    assert mean.weight == var.weight == 4.0
    assert_close(mean.value(), 0.1 * seen.mean((0, 1, 2)), 1e-5)
    unbiased = seen.var((0, 1, 2), ddof=1)
    assert_close(var.value(), 0.9 + 0.1 * unbiased, 1e-5)


def test_what_is_hidden_changes_nothing(net):
    apply, params, extra = net
    junk = np.where(MASK[:, None, None, None], X, np.float32(1e6))
    (y, after), (clean, same) = (apply(params, extra, x, MASK, train=True) for x in (junk, X))
    np.testing.assert_array_equal(y[MASK], clean[MASK])
    jax.tree.map(np.testing.assert_array_equal, after, same)


def test_a_batch_without_a_row_moves_no_statistic(net):
    apply, params, extra = net
    y, after = apply(params, extra, X, np.zeros(6, bool), train=True)
    assert np.isfinite(y).all()
    assert after["norm"]["mean"].weight == 0


def test_evaluation_uses_the_running_ones_and_leaves_them(net):
    apply, params, _ = net
    extra = {"norm": {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 1.0, 9.0])}}
    y, same = apply(params, extra, X)
    want = (X - [1.0, 2.0, 3.0]) / np.sqrt(np.array([4.0, 1.0, 9.0]) + EPSILON)
    assert_close(y, want * [1.0, 2.0, 0.5] + [0.0, -1.0, 3.0], 2e-6)
    jax.tree.map(np.testing.assert_array_equal, same, extra)


def plain(x, real):
    seen = real[:, None, None, None]
    count = real.sum() * x.shape[1] * x.shape[2]
    mean = (seen * x).sum((0, 1, 2), keepdims=True) / count
    var = (seen * jnp.square(x - mean)).sum((0, 1, 2), keepdims=True) / count
    return (x - mean) / jnp.sqrt(var + EPSILON)


@pytest.mark.parametrize("mask", [MASK, np.ones(6, bool)], ids=["ragged", "full"])
def test_the_gradient_is_autodiffs_of_the_plain_formula(mask):
    real, way = jnp.asarray(mask, jnp.float32), jnp.asarray(np.sin(X))
    of = lambda norm: jax.jit(jax.grad(lambda x: (norm(x, real) * way).sum()))(jnp.asarray(X))
    ours = of(lambda x, real: standardize_rows(x, real)[0])
    assert_close(ours, of(plain), 5e-6)


def test_half_precision_is_summed_in_full():
    half, real = jnp.asarray(X, jnp.bfloat16), jnp.ones(6)
    y, mean, _ = standardize_rows(half, real)
    assert (y.dtype, mean.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(mean, np.asarray(half, np.float64).mean((0, 1, 2)), 1e-6)


def test_frozen_statistics_stay_and_couple_no_rows():
    """Training with frozen statistics is the evaluation of a norm with the same statistics."""
    frozen = from_nnx(lambda rngs: BatchNorm(3, epsilon=0.5, frozen=True))
    params, extra = frozen.init(jax.random.key(0))
    extra = {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 1.0, 0.25])}
    y, after = frozen.apply(params, extra, jnp.asarray(X), train=True)
    want = (X - np.array([1.0, 2.0, 3.0])) / np.sqrt(np.array([4.0, 1.0, 0.25]) + 0.5)
    assert_close(y, want, 2e-6)
    jax.tree.map(np.testing.assert_array_equal, after, extra)
    assert (frozen.couples, from_nnx(lambda rngs: BatchNorm(3)).couples) == ("nothing", "batch")


def test_epsilon_is_added_to_the_variance():
    real = jnp.ones(len(X))
    y, *_ = standardize_rows(jnp.asarray(X), real, 2.0)
    wide = X.astype(np.float64)
    want = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 2.0)
    assert_close(y, want, 2e-6)
