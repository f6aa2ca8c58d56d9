"""EfficientNet-lite: its convolutions, its published sizes, and its statistics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import num_elements
from jtrain.models.efficientnet_lite import EfficientNetLite
from jtrain.models.layers.convolution import convolve, convolve_channels
from jtrain.models.presets.vision import LITE_PRESETS

DRAW = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


# Counted in timm's tf_efficientnet_lite0 and the others.
PARAMETERS = {
    "lite0": 4_652_008,
    "lite1": 5_416_680,
    "lite2": 6_092_072,
    "lite3": 8_197_096,
    "lite4": 13_006_568,
}


@pytest.mark.parametrize("name", [n if n == "lite0" else pytest.param(n, marks=pytest.mark.thorough)
                                  for n in LITE_PRESETS])  # fmt: skip
def test_has_as_many_parameters_as_was_published(name: str):
    params, _ = jax.eval_shape(EfficientNetLite(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == PARAMETERS[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
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


def test_running_statistics_couple_no_rows():
    narrow, one = (4,) * 7, (1,) * 7
    tiny = EfficientNetLite(
        image=(8, 8, 1), classes=2, stem=4, widths=narrow, blocks=one, features=4
    )
    frozen = dataclasses.replace(tiny, statistics="running")
    assert (tiny.couples, tiny.build().couples) == ("batch", "batch")
    assert (frozen.couples, frozen.build().couples) == ("nothing", "nothing")
