"""The closed form against the one of JAX, and against the normal distribution."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.layers.feed_forward import gelu

X = jnp.linspace(-30, 30, 2001, dtype=jnp.float32)


def test_value_and_slope_are_jaxs():
    theirs = lambda x: jax.nn.gelu(x, approximate=True)
    assert_close(gelu(X), theirs(X), 1e-6, terms=1)
    slope, expected = (jax.vmap(jax.grad(f))(X) for f in (gelu, theirs))
    assert_close(slope, expected, 1e-5)  # tails cancel in float32


def test_is_close_to_x_times_the_normal_distribution():
    exact = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in np.asarray(X, np.float64)]
    assert_close(gelu(X), exact, 5e-4, terms=1)  # the error of the approximation


def test_far_out_it_stays_finite():
    far = jnp.array([-1e30, -1e4, 1e4, 1e10])
    np.testing.assert_array_equal(gelu(far), [0, 0, 1e4, 1e10])
    np.testing.assert_array_equal(jax.vmap(jax.grad(gelu))(far[1:3]), [0, 1])


def test_half_precision_is_computed_in_full():
    half = X.astype(jnp.bfloat16)
    assert gelu(half).dtype == jax.grad(lambda x: gelu(x).sum())(half).dtype == jnp.bfloat16
    exact = gelu(half.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gelu(half), exact)


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(gelu, (X,), (X,))
