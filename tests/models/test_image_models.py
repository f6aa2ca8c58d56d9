"""Image models: the small CNN against flax, max pooling against windows, published sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.pytree import named_leaves, num_elements
from jtrain.models.classifiers import CNN, EfficientNetLite, ResNet, ViT
from jtrain.models.layers.convolution import convolve_channels, max_pool

pytestmark = pytest.mark.thorough

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


def test_equal_numbers_share_the_gradient():
    grad = jax.grad(lambda x: max_pool(x, 2).sum())(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(grad, np.full((1, 4, 4, 1), 0.25))


# https://docs.pytorch.org/vision/stable/models.html, timm's tf_efficientnet_lite0 and the others,
# https://github.com/huggingface/pytorch-image-models/tree/main/results
PUBLISHED = {
    ResNet: {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032},
    EfficientNetLite: {"lite0": 4_652_008, "lite4": 13_006_568},
    ViT: {"vit-s16": 22_050_664, "vit-b16": 86_567_656},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_has_as_many_parameters_as_were_published(kind):
    for name, count in PUBLISHED[kind].items():
        params, extra = jax.eval_shape(kind(preset=name).build().init, jax.random.key(0))
        assert num_elements(params) == count, name
        norms = [leaf for path, leaf in named_leaves(params).items() if path.endswith("scale")]
        assert num_elements(extra) == (0 if kind is ViT else 2 * num_elements(norms)), name


DRAW = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 2)])
def test_convolves_each_channel_as_xla_does_with_groups(kernel: int, stride: int):
    x = draw(2, 7, 4, 3)
    w = draw(kernel, kernel, 1, 3)

    def grouped(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            feature_group_count=3,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def ours(x, w):
        return convolve_channels(x, w, stride=stride)

    assert_close(ours(x, w), grouped(x, w), 1e-6)
    slope = lambda call: jax.grad(lambda x, w: jnp.square(call(x, w)).sum(), (0, 1))(x, w)
    for got, want in zip(slope(ours), slope(grouped), strict=True):
        assert_close(got, want, 1e-5)
