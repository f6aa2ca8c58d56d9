"""The vision transformer: published sizes, its patches, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import num_elements
from jtrain.errors import DataError
from jtrain.models.networks.vit import FullAttention, cut
from jtrain.models.vit import ViT

SMALL = {"image": (6, 4, 2), "patch": 2, "layers": 1, "heads": 2, "width": 8, "classes": 3}
# timm's results table: https://github.com/huggingface/pytorch-image-models/tree/main/results
PUBLISHED = {"vit-s16": 22_050_664, "vit-b16": 86_567_656}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_has_as_many_parameters_as_were_published(name):
    params, extra = jax.eval_shape(ViT(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == PUBLISHED[name]
    assert extra == {}


def test_a_linear_map_of_the_patches_is_a_convolution_with_their_stride():
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((3, 6, 4, 2)), jnp.float32)
    kernel = jnp.asarray(draw.standard_normal((2, 2, 2, 5)), jnp.float32)
    dims = ("NHWC", "HWIO", "NHWC")
    want = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=dims)
    got = cut(x, 2) @ kernel.reshape(-1, 5)
    assert_close(got, want.reshape(3, -1, 5), 2e-6)


def test_every_position_is_attended_to():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
    scores = np.einsum("bthk,bshk->bhts", q, k, dtype=np.float64) / 2
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    want = np.einsum("bhts,bshk->bthk", chances, v)
    assert_close(FullAttention()(*map(jnp.asarray, (q, k, v))), want, 2e-6)


@pytest.mark.parametrize(("pool", "positions"), [("class", 7), ("mean", 6)])
def test_a_class_token_is_one_position_more(pool, positions):
    model = ViT(**SMALL, pool=pool).build()
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert params["positions"].shape == (positions, 8)
    assert ("token" in params) == (pool == "class")


@pytest.mark.parametrize(
    ("said", "words", "mended"),
    [
        ({"patch": 4}, r"patches of 4 x 4.* 6 x 4. Nearest: patch=2\.", {"patch": 2}),
        ({"heads": 3}, r"3 heads do not divide width 8. Nearest: heads=2\.", {"heads": 2}),
        ({"preset": "vitb16"}, r"no preset 'vitb16'.*mean preset=vit-b16\?", {"preset": "none"}),
    ],
    ids=["patch", "heads", "preset"],
)
def test_sizes_that_do_not_divide_are_told_with_the_nearest(said, words, mended):
    with pytest.raises(ValueError, match=words):
        ViT(**{**SMALL, **said})
    assert ViT(**{**SMALL, **mended})


def test_images_of_another_shape_are_refused():
    model = ViT(**SMALL).build()
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(DataError, match=r"shape \[4, 6, 2\].*takes \[6, 4, 2\].*Set model\.image="):
        jax.eval_shape(lambda p: model.apply(p, {}, jnp.zeros((1, 4, 6, 2))), params)
