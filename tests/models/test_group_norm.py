"""Group norm against its plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.layers.group_norm import EPSILON, GroupNorm

pytestmark = pytest.mark.usefixtures("strict_dtypes")
X = (3 + 2 * np.random.default_rng(0).standard_normal((4, 3, 5, 6))).astype(np.float32)


def plain(x, groups):
    split = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean, var = split.mean((1, 3), keepdims=True), split.var((1, 3), keepdims=True)
    return ((split - mean) / jnp.sqrt(var + EPSILON)).reshape(x.shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_gives_the_numbers_and_the_gradient_of_the_formula(groups):
    norm, x, way = GroupNorm(6, groups=groups), jnp.asarray(X), jnp.asarray(np.sin(X))
    assert_close(norm(x), plain(x, groups), 2e-6)
    of = lambda fn: jax.jit(jax.grad(lambda x: (fn(x) * way).sum()))(x)
    assert_close(of(norm), of(lambda x: plain(x, groups)), 5e-6)


def test_a_row_knows_of_no_other():
    norm = GroupNorm(6, groups=2)
    assert_close(norm(jnp.asarray(X[2:3])), norm(jnp.asarray(X))[2:3], 1e-6)


def test_keeps_half_precision():
    assert GroupNorm(6, groups=2)(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16
