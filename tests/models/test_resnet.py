"""ResNet, EfficientNet-lite and ViT: published sizes, their layers, and hidden rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close

import jtrain as jt
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.efficientnet_lite import EfficientNetLite
from jtrain.models.layers.convolution import convolve, convolve_channels
from jtrain.models.networks.encoder import FullAttention, cut
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

SMALL = {"image": (6, 6, 2), "width": 4, "stem": "cifar", "classes": 3}
# torchvision's: https://docs.pytorch.org/vision/stable/models.html
PUBLISHED = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_has_as_many_parameters_as_were_published(name):
    params, extra = jax.eval_shape(ResNet(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == PUBLISHED[name]
    norms = [leaf for path, leaf in named_leaves(params).items() if path.endswith("scale")]
    assert num_elements(extra) == 2 * num_elements(norms)


def classify(values):
    """Compute the loss of docs/vision.md."""
    model = values.build()

    def loss(params, extra, batch, rng):
        keys, mask = jt.row_keys(rng, batch), batch["mask"]
        logits, extra = model.apply(params, extra, batch["image"], mask=mask, rng=keys)
        return *cross_entropy(logits, batch["label"], batch["mask"]), extra

    return model, jt.stateful(loss)


def batch_of(rows, hidden):
    draw = np.random.default_rng(0)
    image = draw.standard_normal((rows, 6, 6, 2)).astype(np.float32)
    label = draw.integers(0, 3, rows).astype(np.int32)
    image[rows - hidden :] = np.nan
    mask = np.arange(rows) < rows - hidden
    return {"image": image, "label": label, "row": np.arange(rows, dtype=np.int32), "mask": mask}


@pytest.mark.thorough
def test_a_padded_batch_takes_the_step_of_its_real_rows():
    values, optimizer = ResNet(**SMALL, blocks=(1,)), optax.sgd(0.1)
    model, loss = classify(values)
    params, extra = jax.jit(model.init)(jax.random.key(0))
    step = jax.jit(jt.make_step(loss, optimizer, couples=values.couples, ragged=True))
    padded, real = batch_of(8, hidden=3), {k: v[:5] for k, v in batch_of(8, hidden=3).items()}
    start = jt.new_state(params, optimizer, jax.random.key(1), extra)
    (got, metrics), (want, expected) = step(start, padded), step(start, real)
    assert_close(metrics["loss"].value(), expected["loss"].value(), 1e-6)
    assert_leaves_close((got.params, got.extra), (want.params, want.extra), 1e-5)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(got.extra["norm"]["mean"]))


DRAW = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


# Counted in timm's tf_efficientnet_lite0 and the others.
PARAMETERS = {
    "lite0": 4_652_008,
    "lite4": 13_006_568,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lite0", "lite4"])
def test_lite_has_as_many_parameters_as_was_published(name: str):
    params, _ = jax.eval_shape(EfficientNetLite(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == PARAMETERS[name]


@pytest.mark.thorough
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 2)])
def test_convolves_each_channel_as_xla_does_with_groups(kernel: int, stride: int):
    x = draw(2, 7, 4, 3)
    w = draw(kernel, kernel, 1, 3)

    def grouped(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", feature_group_count=3,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def ours(x, w):
        return convolve_channels(x, w, stride=stride)

    assert_close(ours(x, w), grouped(x, w), 1e-6)
    slope = lambda call: jax.grad(lambda x, w: jnp.square(call(x, w)).sum(), (0, 1))(x, w)
    for got, want in zip(slope(ours), slope(grouped), strict=True):
        assert_close(got, want, 1e-5)


def test_pads_as_tensorflow_does():
    x = draw(1, 6, 5, 2)
    w = draw(3, 3, 2, 4)
    want = jax.lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert_close(convolve(x, w, stride=2, same=True), want, 1e-6)
    even = convolve(x, w, stride=2)
    assert even.shape == want.shape
    assert np.abs(even - want).max() > 0.1


# timm's results table: https://github.com/huggingface/pytorch-image-models/tree/main/results
TRANSFORMERS = {"vit-s16": 22_050_664, "vit-b16": 86_567_656}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_vit_has_as_many_parameters_as_were_published(name):
    params, extra = jax.eval_shape(ViT(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == TRANSFORMERS[name]
    assert extra == {}


def test_a_linear_map_of_the_patches_is_a_convolution_with_their_stride():
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((3, 6, 4, 2)), jnp.float32)
    kernel = jnp.asarray(draw.standard_normal((2, 2, 2, 5)), jnp.float32)
    dims = ("NHWC", "HWIO", "NHWC")
    want = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=dims)
    got = cut(x, 2) @ kernel.reshape(-1, 5)
    assert_close(got, want.reshape(3, -1, 5), 2e-6)


@pytest.mark.thorough
def test_every_position_is_attended_to():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
    scores = np.einsum("bthk,bshk->bhts", q, k, dtype=np.float64) / 2
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    want = np.einsum("bhts,bshk->bthk", chances, v)
    assert_close(FullAttention()(*map(jnp.asarray, (q, k, v))), want, 2e-6)
