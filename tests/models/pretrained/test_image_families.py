"""Published image classifiers give the logits of `transformers` and timm; their pixels are read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from comparison import assert_close

from jtrain.models.classifiers import ResNet, ViT
from jtrain.models.images import Pixels
from jtrain.models.pretrained.families.images import TIMM_VIT
from jtrain.models.pretrained.folder import PREPROCESSOR
from jtrain.models.pretrained.source import PretrainedWeights, params_from_timm

WITHIN = 1e-5  # torch sums in another order; measured 2e-6 at the most, and the bar is 1e-4
SMALL = ["vit", "resnet", "resnet_bottleneck"]
IMAGES = [
    *SMALL,
    *(
        pytest.param(n, marks=pytest.mark.thorough)
        for n in ("timm_vit", "timm_resnet", "efficientnet_lite")
    ),
]


def read(folder: Path) -> tuple[Any, Any, Any]:
    """Return the config, the parameters and the running statistics of a folder."""
    source = PretrainedWeights(folder)
    return source.model, *published.read_weights(source)


@pytest.mark.thorough
@pytest.mark.parametrize("name", IMAGES)
def test_a_classifier_gives_the_logits_of_its_library(name: str, tmp_path):
    golden = published.golden(name)
    model, params, extra = read(published.write_model(tmp_path, golden))
    pixels = published.draw_pixels(tuple(golden["pixels"])).transpose(0, 2, 3, 1)
    model = dataclasses.replace(model, image=pixels.shape[1:])
    logits, after = jax.jit(model.build().apply)(params, extra, jnp.asarray(pixels))
    assert np.abs(golden["outputs"]).max() > 1
    assert_close(logits, golden["outputs"], WITHIN)
    jax.tree.map(np.testing.assert_array_equal, after, extra)


def test_the_images_of_a_vit_of_timm_have_the_size_of_its_pretrained_cfg():
    hf = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 384, 256]}}
    assert TIMM_VIT.values(hf)["image"] == (384, 256, 3)


def folder_with(tmp_path: Path, name: str, **entries: Any) -> Path:
    folder = published.write_model(tmp_path / name, published.golden(name))
    (folder / PREPROCESSOR).write_text(json.dumps(entries))
    return folder


RANGE: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.5]}


def test_pixels_are_those_of_the_preprocessor(tmp_path):
    size = {"height": 8, "width": 8}
    folder = folder_with(tmp_path, "vit", size=size, rescale_factor=1 / 255, **RANGE)
    model = ViT(pretrained=str(folder))
    assert model.pixels == Pixels(
        height=8, width=8, channels=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.5)
    )
    assert (model.image, model.classes) == ((8, 8, 3), 5)
    edge = folder_with(tmp_path, "resnet", size={"shortest_edge": 32}, do_normalize=False, **RANGE)
    assert ResNet(pretrained=str(edge)).pixels == Pixels(height=32, width=32, channels=3)
    cropped = folder_with(
        tmp_path, "resnet", size={"shortest_edge": 40}, do_center_crop=True, crop_size=32
    )
    assert ResNet(pretrained=str(cropped)).pixels == Pixels(height=32, width=32, channels=3)


@pytest.mark.thorough
def test_an_image_of_another_size_is_changed_as_by_hand(tmp_path):
    """Bytes of a grey image give the logits of the same numbers, changed in numpy."""
    folder = folder_with(tmp_path, "vit", size={"height": 8, "width": 8}, **RANGE)
    _, params, extra = read(folder)
    model = dataclasses.replace(ViT(pretrained=str(folder)), image=(4, 4, 1))
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 1), np.uint8)
    mean, std = (np.array(RANGE[f"image_{name}"], np.float32) for name in ("mean", "std"))
    # Twice as large: a pixel is a quarter of one neighbour and three of the other.
    ramp = np.zeros((8, 4), np.float32)
    for i in range(8):
        near = i // 2
        ramp[i, near] += 0.75
        ramp[i, np.clip(near + (1 if i % 2 else -1), 0, 3)] += 0.25
    grey = np.einsum("ih,bhwc,jw->bijc", ramp, images.astype(np.float32) / 255, ramp)
    changed = (np.repeat(grey, 3, 3) - mean) / std
    given = dataclasses.replace(model, image=(8, 8, 3), pixels=Pixels())
    got, _ = jax.jit(model.build().apply)(params, extra, jnp.asarray(images))
    want, _ = jax.jit(given.build().apply)(params, extra, jnp.asarray(changed))
    assert_close(got, want, WITHIN)


@pytest.mark.thorough
def test_the_names_of_the_other_package_are_those_of_timm(tmp_path):
    """The tensors of efficientnet-lite-pytorch, in the order in which both list the layers."""
    golden = published.golden("efficientnet_lite")
    source = PretrainedWeights(published.write_model(tmp_path / "timm", golden))
    ends = {
        "conv_pw": "_expand_conv",
        "conv_dw": "_depthwise_conv",
        "conv_pwl": "_project_conv",
        "bn1": "_bn0",
        "bn2": "_bn1",
        "bn3": "_bn2",
    }
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    outside = {
        "conv_stem": "_conv_stem",
        "bn1": "_bn0",
        "conv_head": "_conv_head",
        "bn2": "_bn1",
        "classifier": "_fc",
    }
    starts = np.cumsum([0, 1, 2, 2, 3, 3, 4])
    changes: dict[str, Any] = {}
    for name, array in published.tensors_of(golden).items():
        parts = name.split(".")
        if parts[0] == "blocks":
            _, stage, number, layer, end = parts
            layer = (ends if int(stage) else first)[layer]
            other = f"_blocks.{starts[int(stage)] + int(number)}.{layer}.{end}"
        else:
            other = f"{outside[parts[0]]}.{parts[1]}"
        changes |= {name: None, other: array}
    other = PretrainedWeights(published.write_model(tmp_path / "other", golden, **changes))
    arrays = source.read(source.found)
    for name, array in other.read(other.found).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


SIZE = {"image": (64, 64, 3), "classes": 11}
NETS = {
    "resnet18": (ResNet(preset="resnet18", **SIZE), {}),
    "resnet50": (ResNet(preset="resnet50", **SIZE), {}),
    "vit_base_patch16_224": (
        ViT(preset="vit-b16", **SIZE, layers=2, width=96, heads=4),
        {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_gives_the_logits_of_timm(name):
    """The comparison needs torch and timm: `pip install 'jtrain[timm]'`, and `-m slow`."""
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm")
    values, sizes = NETS[name]
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=values.classes, **sizes).eval()
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):  # at the start it does nothing
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
            part.weight.data.uniform_(0.2, 0.6)
            part.bias.data.normal_(0, 0.1)
    x = np.random.default_rng(0).standard_normal((2, *values.image)).astype(np.float32)
    with torch.no_grad():
        want = net(torch.tensor(x).permute(0, 3, 1, 2)).numpy()
    arrays = {n: array.numpy() for n, array in net.state_dict().items()}
    params, extra = params_from_timm(values, arrays)
    got, _ = jax.jit(values.build().apply, static_argnames="train")(params, extra, x)
    assert np.abs(want).max() > 0.1
    assert_close(got, want, 1e-4)
