"""Max pooling against XLA's windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.jaxpr import operations
from jtrain.models.layers.pooling import max_pool

# height, width, window, stride, padding
SHAPES = [
    (9, 7, 2, 2, 0),  # what fills no window is left out
    (8, 8, 3, 2, 1),  # a ResNet's
    (7, 9, 3, 2, 1),
    (11, 10, 2, 3, 0),
]


def by_windows(x, window, stride, padding):
    sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    size, step = (1, window, window, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, step, sides)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gives_the_numbers_and_the_gradient_of_windows(shape):
    height, width, *rest = shape
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, height, width, 3)), jnp.float32)

    def of(pool):
        pooled, back = jax.vjp(jax.jit(lambda x: pool(x, *rest)), x)
        return pooled, back(jnp.sin(pooled))[0]

    (got, grad), (want, expected) = of(max_pool), of(by_windows)
    np.testing.assert_array_equal(got, want)
    assert_close(grad, expected, 1e-6)


@pytest.mark.parametrize("rest", [(2,), (3, 2, 1)], ids=str)
def test_no_window_is_scattered_into(rest):
    x = jnp.ones((2, 6, 6, 3))
    found = operations(jax.grad(lambda x: max_pool(x, *rest).sum()), x)
    assert "reduce_max" in found or "max" in found
    assert not {name for name in found if "scatter" in name or "window" in name}


def test_equal_numbers_share_the_gradient():
    grad = jax.grad(lambda x: max_pool(x, 2).sum())(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(grad, np.full((1, 4, 4, 1), 0.25))


def test_keeps_half_precision():
    assert max_pool(jnp.ones((1, 4, 4, 1), jnp.bfloat16), 3, 2, 1).dtype == jnp.bfloat16


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_whole_tiles_are_differentiated_as_a_maximum_is(dtype):
    draw = np.random.default_rng(1)
    # Few values: many tiles have two, three or four equal maxima.
    x, t, u = (jnp.asarray(draw.integers(0, 3, (2, 6, 8, 3)), dtype) for _ in range(3))
    by_max = lambda x: x.reshape(2, 3, 2, 4, 2, 3).max((2, 4))
    of = lambda pool: lambda x: jnp.square(pool(x).astype(jnp.float32)).sum()

    def results(pool):
        forward = jax.jvp(pool, (x,), (t,))
        second = jax.jvp(jax.grad(of(pool)), (x,), (u,))
        rows = jax.vmap(jax.grad(lambda x: of(pool)(x)))(jnp.stack([x, t]))
        return forward, second, rows

    got = results(lambda x: max_pool(x, 2))
    assert jax.tree.leaves(got)[1].dtype == dtype
    within = 4 * float(jnp.finfo(dtype).eps)
    for one, other in zip(*map(jax.tree.leaves, (got, results(by_max))), strict=True):
        assert_close(one, other, within)
