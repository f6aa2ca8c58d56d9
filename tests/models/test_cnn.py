"""The small CNN against flax's layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.jaxpr import operations
from jtrain.errors import ConfigError, DataError
from jtrain.models.cnn import CNN
from jtrain.models.layers.convolution import Convolution, convolve
from jtrain.models.layers.pooling import max_pool

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


def test_computes_what_flaxs_layers_compute(net):
    apply, params = net
    logits, extra = apply(params, {}, IMAGES)
    assert extra == {}
    assert_close(logits, by_flax(params, IMAGES), 1e-5)


def test_one_channel_need_not_be_a_dim_and_hidden_rows_change_nothing(net):
    apply, params = net
    whole, _ = apply(params, {}, IMAGES)
    np.testing.assert_array_equal(apply(params, {}, IMAGES[..., 0])[0], whole)
    mask = np.array([True, False, True, True, False])
    spoilt = np.where(mask[:, None, None, None], IMAGES / np.float32(255), np.nan)
    logits, _ = apply(params, {}, spoilt.astype(np.float32), mask=mask)
    assert_close(logits[mask], whole[mask], 2e-6)
    assert np.isfinite(logits).all()


def test_its_gradient_scatters_into_no_window(net):
    apply, params = net
    found = operations(jax.grad(lambda p: apply(p, {}, IMAGES, train=True)[0].sum()), params)
    assert "conv_general_dilated" in found
    assert not {name for name in found if "select_and" in name or "reduce_window" in name}


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((5, 8, 9, 1), r"images of shape \[8, 9, 1\], and the model takes \[9, 8, 1\]: height, "),
        ((5, 9, 8, 3), r"Set model\.image=\[9, 8, 3\]"),
        ((5, 72), r"images of shape \[72\].*Give rows of that shape"),
    ],
    ids=str,
)
def test_images_of_another_shape_are_refused(net, shape, words):
    apply, params = net
    with pytest.raises(DataError, match=words):
        jax.eval_shape(lambda p, x: apply(p, {}, x), params, jnp.zeros(shape))


def test_the_shape_that_a_refusal_says_is_taken():
    model = CNN(image=(9, 8, 3), classes=2).build()
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    run = lambda p, x: model.apply(p, {}, x)[0]
    assert jax.eval_shape(run, params, jnp.zeros((5, 9, 8, 3))).shape == (5, 2)


def test_a_size_that_nobody_gave_is_refused():
    with pytest.raises(ConfigError, match=r"image=\[0, 0, 0\] and classes=3.*Set model\.image="):
        CNN(classes=3).build()


def test_more_pools_than_the_image_has_room_for_are_refused():
    with pytest.raises(ValueError, match=r"3 convolutions halve.*4 x 9.*model\.channels=\[1, 2\]"):
        CNN(image=(4, 9, 1), channels=(1, 2, 3))
    assert CNN(image=(4, 9, 1), channels=(1, 2))


def test_a_bias_after_the_pool_gives_the_same_bits():
    layer = Convolution(3, 4, 3, bias=True, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    assert layer.bias is not None
    layer.bias[...] = jnp.asarray(draw.standard_normal(4), jnp.float32)
    x = jnp.asarray(draw.standard_normal((2, 7, 6, 3)), jnp.float32)
    np.testing.assert_array_equal(layer(x, pool=2), max_pool(layer(x), 2))


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_size_is_divided_by_the_stride_and_rounded_up(kernel, stride):
    size = lambda n: jax.eval_shape(
        lambda x, w: convolve(x, w, stride=stride),
        jax.ShapeDtypeStruct((1, n, n, 1), jnp.float32),
        jax.ShapeDtypeStruct((kernel, kernel, 1, 1), jnp.float32),
    ).shape[1:3]
    assert [size(n) for n in (1, 2, 5, 8)] == [(-(-n // stride),) * 2 for n in (1, 2, 5, 8)]
