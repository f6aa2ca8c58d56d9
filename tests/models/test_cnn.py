"""The small CNN against flax's layers, and max pooling against XLA's windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.interpret import operations
from jtrain.models.cnn import CNN
from jtrain.models.layers.convolution import Convolution, max_pool

VALUES = CNN(image=(9, 8, 1), channels=(4, 6), widths=(7,), classes=3)
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 9, 8, 1)).astype(np.uint8)


@pytest.fixture(scope="module", name="net")
def _net():
    model = VALUES.build()
    noise = np.random.default_rng(1)
    fill = lambda leaf: jnp.asarray(noise.normal(0, 0.3, leaf.shape), jnp.float32)
    params = jax.tree.map(fill, jax.eval_shape(model.init, jax.random.key(0))[0])
    return jax.jit(model.apply, static_argnames="train"), params


@jax.jit
def by_flax(params, x):
    x = x.astype(jnp.float32) / 255
    for i, (before, after) in enumerate([(1, 4), (4, 6)]):
        layer = nnx.Conv(before, after, (3, 3), rngs=nnx.Rngs(0))
        layer.kernel[...] = params["convolutions"][str(i)]["kernel"]
        assert layer.bias is not None
        layer.bias[...] = params["convolutions"][str(i)]["bias"]
        x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
    x = x.reshape(len(x), -1)
    for i in range(2):
        kernel = params["layers"][str(i)]["kernel"]  # both narrow: outputs, inputs
        x = x @ kernel.T + params["layers"][str(i)]["bias"][None]
        x = nnx.relu(x) if i == 0 else x
    return x


@pytest.mark.thorough
def test_computes_what_flaxs_layers_compute(net):
    apply, params = net
    logits, extra = apply(params, {}, IMAGES)
    assert extra == {}
    assert_close(logits, by_flax(params, IMAGES), 1e-5)


@pytest.mark.thorough
def test_one_channel_need_not_be_a_dim_and_hidden_rows_change_nothing(net):
    apply, params = net
    whole, _ = apply(params, {}, IMAGES)
    np.testing.assert_array_equal(apply(params, {}, IMAGES[..., 0])[0], whole)
    mask = np.array([True, False, True, True, False])
    spoilt = np.where(mask[:, None, None, None], IMAGES / np.float32(255), np.nan)
    logits, _ = apply(params, {}, spoilt.astype(np.float32), mask=mask)
    assert_close(logits[mask], whole[mask], 2e-6)
    assert np.isfinite(logits).all()


@pytest.mark.thorough
def test_a_bias_after_the_pool_gives_the_same_bits():
    layer = Convolution(3, 4, 3, bias=True, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    assert layer.bias is not None
    layer.bias[...] = jnp.asarray(draw.standard_normal(4), jnp.float32)
    x = jnp.asarray(draw.standard_normal((2, 7, 6, 3)), jnp.float32)
    np.testing.assert_array_equal(layer(x, pool=2), max_pool(layer(x), 2))


# height, width, window, stride, padding
SHAPES = [
    (9, 7, 2, 2, 0),  # what fills no window is left out
    (7, 9, 3, 2, 1),
    (11, 10, 2, 3, 0),
]


def by_windows(x, window, stride, padding):
    sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    size, step = (1, window, window, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, step, sides)


@pytest.mark.thorough
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


def test_no_window_is_scattered_into():
    rest = (3, 2, 1)
    x = jnp.ones((2, 6, 6, 3))
    found = operations(jax.grad(lambda x: max_pool(x, *rest).sum()), x)
    assert "reduce_max" in found or "max" in found
    assert not {name for name in found if "scatter" in name or "window" in name}


@pytest.mark.thorough
def test_equal_numbers_share_the_gradient():
    grad = jax.grad(lambda x: max_pool(x, 2).sum())(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(grad, np.full((1, 4, 4, 1), 0.25))
