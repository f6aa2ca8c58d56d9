"""The closed form against autodiff of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.layers.norms import layer_norm

DRAW = np.random.default_rng(0)
X, SCALE, BIAS, WAY = (
    jnp.asarray(DRAW.standard_normal(shape), jnp.float32)
    for shape in ((3, 5, 16), 16, 16, (3, 5, 16))
)


def plain(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale[None, None] + bias[None, None]


@pytest.mark.thorough
def test_value_and_gradients_are_autodiffs():
    got, pull = jax.vjp(layer_norm, 3 + 2 * X, SCALE, BIAS)
    expected, pull_plain = jax.vjp(plain, 3 + 2 * X, SCALE, BIAS)
    assert_close(got, expected, 2e-6)
    for ours, theirs in zip(pull(WAY), pull_plain(WAY), strict=True):
        assert_close(ours, theirs, 5e-6)


def test_takes_its_statistics_in_float32():
    half = (100 + X).astype(jnp.bfloat16)
    ones, zeros = jnp.ones(16, jnp.bfloat16), jnp.zeros(16, jnp.bfloat16)
    got = layer_norm(half, ones, zeros)
    exact = plain(half.astype(jnp.float32), jnp.ones(16), jnp.zeros(16))
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), exact, 1e-2)


def test_a_row_of_one_value_stays_finite():
    grad = jax.grad(lambda x: layer_norm(x, SCALE, BIAS).sum())(jnp.ones((2, 16)))
    assert jnp.isfinite(grad).all()


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: layer_norm(x, SCALE, BIAS), (X,), (X,))
