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

from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError
from jtrain.models.efficientnet_lite import EfficientNetLite
from jtrain.models.pixels import Pixels
from jtrain.models.pretrained.families.efficientnet_lite import EFFICIENTNET_LITE
from jtrain.models.pretrained.families.images import label_count
from jtrain.models.pretrained.families.resnet import TIMM_RESNET
from jtrain.models.pretrained.families.vit import VIT
from jtrain.models.pretrained.preprocessor import PREPROCESSOR
from jtrain.models.pretrained.registry import family_of
from jtrain.models.pretrained.source import PretrainedWeights, describe_source
from jtrain.models.pretrained.write import hf_config, without_class_names, write_folder
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

WITHIN = 1e-5  # torch sums in another order; measured 2e-6 at the most, and the bar is 1e-4
SMALL = ["vit", "resnet", "resnet_bottleneck"]
IMAGES = [*SMALL, *(pytest.param(n, marks=pytest.mark.thorough)
                    for n in ("timm_vit", "timm_resnet", "efficientnet_lite"))]  # fmt: skip
CLASSES = {"vit": ViT, "resnet": ResNet, "efficientnet_lite": EfficientNetLite}


def read(folder: Path) -> tuple[Any, Any, Any]:
    """Return the config, the parameters and the running statistics of a folder."""
    source = PretrainedWeights(folder)
    like = jax.eval_shape(source.model.build().init, jax.random.key(0))
    named = {**named_leaves(like[0]), **{f"extra/{n}": x for n, x in named_leaves(like[1]).items()}}
    arrays = source.read(named)
    leaves = [jnp.asarray(arrays[name]) for name in named]
    return source.model, *jax.tree.unflatten(jax.tree.structure(like), leaves)


@pytest.mark.sampled(2)
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


def test_without_a_preprocessor_the_range_is_that_of_the_bytes(tmp_path):
    model = ViT(pretrained=str(published.write_model(tmp_path / "vit", published.golden("vit"))))
    assert model.pixels == Pixels(height=8, width=8, channels=3)
    net = published.write_model(tmp_path / "resnet", published.golden("resnet"))
    assert ResNet(pretrained=str(net)).pixels == Pixels(channels=3)


def test_a_range_that_no_file_says_is_told_with_the_line_to_type(tmp_path):
    folder = published.write_model(tmp_path / "vit", published.golden("vit"))
    (line,) = describe_source(ViT(pretrained=str(folder)))
    assert "no preprocessor_config.json says" in line
    assert "they stay in 0 .. 1" in line
    typed = dict(word.split("=") for word in line.split() if word.startswith("model.pixels."))
    mean, std = (tuple(json.loads(typed[f"model.pixels.{name}"])) for name in ("mean", "std"))
    ranged = Pixels(height=8, width=8, channels=3, mean=mean, std=std)
    assert not describe_source(ViT(pretrained=str(folder), pixels=ranged))
    assert not describe_source(ViT(pretrained=str(folder_with(tmp_path, "vit", **RANGE))))
    same = folder_with(tmp_path, "vit", do_normalize=False)
    assert not describe_source(ViT(pretrained=str(same)))
    (tmp_path / "config.json").write_text('{"architecture": "tf_efficientnet_lite0"}')
    (line,) = describe_source(EfficientNetLite(pretrained=str(tmp_path)))
    assert "no config.json says" in line
    assert "mean and std 0.5 are assumed" in line
    assert not describe_source(ViT(image=(8, 8, 3)))


def test_timm_has_its_range_in_the_config(tmp_path):
    golden = published.golden("efficientnet_lite")
    model = EfficientNetLite(pretrained=str(published.write_model(tmp_path, golden)))
    half = (0.5, 0.5, 0.5)
    assert model.pixels == Pixels(height=64, width=64, channels=3, mean=half, std=half)
    assert (model.classes, model.couples) == (5, "batch")
    (tmp_path / "config.json").write_text('{"architecture": "tf_efficientnet_lite0"}')
    with pytest.raises(CheckpointError, match=r"classifier.weight +is 5 x 1280, and .* 1000 x"):
        PretrainedWeights(tmp_path)
    model = EfficientNetLite(pretrained=str(tmp_path))
    assert model.pixels == Pixels(channels=3, mean=half, std=half)


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


def test_the_export_says_what_the_run_did_to_pixels(tmp_path):
    crop = {"do_center_crop": True, "crop_size": 8, "size": {"shortest_edge": 10}, "resample": 3}
    folder = folder_with(tmp_path, "resnet", do_resize=True, crop_pct=0.875, **crop, **RANGE)
    source = PretrainedWeights(folder)
    arrays = source.read(source.found)
    pixels = Pixels(height=6, width=8, channels=3, mean=(0.1, 0.2, 0.3), std=(1, 1, 2))
    model = dataclasses.replace(source.model, pixels=pixels)
    write_folder(tmp_path / "out", source.family, model, arrays.__getitem__, base=source.hf,
                 beside=folder)  # fmt: skip
    written = json.loads((tmp_path / "out" / PREPROCESSOR).read_text())
    assert (written["image_mean"], written["image_std"]) == ([0.1, 0.2, 0.3], [1, 1, 2])
    assert written["size"] == {"height": 6, "width": 8}
    assert (written["resample"], written["do_resize"], written["do_normalize"]) == (2, True, True)
    assert not {"do_center_crop", "crop_size", "crop_pct"} & written.keys()
    assert ResNet(pretrained=str(tmp_path / "out")).pixels == pixels


def test_names_of_classes_are_those_of_the_head():
    names = {str(i): name for i, name in enumerate(("ant", "bee", "cat", "dog", "eel"))}
    source = published.golden("vit")["config"] | {"id2label": names, "num_labels": 5}
    model = ViT(**VIT.values(source))
    assert hf_config(VIT, model, "float32", source)["id2label"] == names
    new_head = hf_config(VIT, model, "float32", without_class_names(source))
    wider = hf_config(VIT, dataclasses.replace(model, classes=6), "float32", source)
    for found, count in ((new_head, 5), (wider, 6)):
        assert found["id2label"] == {str(i): f"LABEL_{i}" for i in range(count)}
        assert label_count(found) == count
    timm = {"architecture": "resnet18", "label_names": ["ant"], "label_descriptions": {"ant": "x"}}
    model = ResNet(preset="resnet18", classes=2)
    found = hf_config(TIMM_RESNET, model, "float32", timm)
    assert not {"label_names", "label_descriptions"} & found.keys()


def test_a_config_of_timm_says_what_the_run_did_to_pixels():
    about = {"interpolation": "bicubic", "crop_pct": 0.95, "test_crop_pct": 1.0, "tag": "a1_in1k"}
    model = ResNet(preset="resnet18", pixels=Pixels(height=96, width=96))
    written = hf_config(TIMM_RESNET, model, "float32", {"pretrained_cfg": about})["pretrained_cfg"]
    assert (written["interpolation"], written["crop_mode"]) == ("bilinear", "squash")
    assert (written["crop_pct"], written["input_size"]) == (1.0, [3, 96, 96])
    assert "test_crop_pct" not in written
    assert written["tag"] == "a1_in1k"


def test_pixels_without_a_range_come_back_from_timm_without_one(tmp_path):
    """EfficientNet-lite's range is -1 .. 1 where its config says none."""
    model = EfficientNetLite(preset="lite0", pixels=Pixels(height=64, width=64))
    (tmp_path / "config.json").write_text(json.dumps(EFFICIENTNET_LITE.hf(model)))
    pixels = EfficientNetLite(pretrained=str(tmp_path)).pixels
    assert (pixels.mean, pixels.std) == ((0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"do_rescale": False}, r"do_rescale=False .*Fold another factor into image_mean"),
        ({"rescale_factor": 1 / 127.5}, r"rescale_factor=0.0078.* 0.003922"),
    ],
)
def test_pixels_that_are_changed_otherwise_are_refused(entries, words, tmp_path):
    folder = folder_with(tmp_path, "vit", **entries)
    with pytest.raises(ValueError, match=words):
        ViT(pretrained=str(folder))


def test_a_broken_preprocessor_is_refused(tmp_path):
    folder = folder_with(tmp_path, "vit")
    for text, words in {"{": "is no JSON", "[]": "holds a list"}.items():
        (folder / PREPROCESSOR).write_text(text)
        with pytest.raises(ValueError, match=f"{PREPROCESSOR} {words}.*Download it again"):
            ViT(pretrained=str(folder))


def test_an_architecture_of_timm_that_is_not_known_names_the_near_ones(tmp_path):
    golden = published.golden("efficientnet_lite")
    other = {**golden, "config": {**golden["config"], "architecture": "efficientnet_lite0"}}
    words = r"architecture='efficientnet_lite0'.*did you mean tf_efficientnet_lite0\?"
    with pytest.raises(CheckpointError, match=words):
        PretrainedWeights(published.write_model(tmp_path, other))


def test_stages_that_do_not_double_are_refused(tmp_path):
    golden = published.golden("resnet")
    other = {**golden, "config": {**golden["config"], "hidden_sizes": [8, 12]}}
    with pytest.raises(CheckpointError, match=r"hidden_sizes=\[8, 12\].*double .*\[8, 16\]"):
        PretrainedWeights(published.write_model(tmp_path, other))


def test_all_tensors_of_a_network_that_do_not_fit_are_in_one_table(tmp_path):
    golden = published.golden("resnet")
    stats = "resnet.embedder.embedder.normalization.running_mean"
    changes = {
        stats: None,
        "classifier.1.weight": np.zeros((7, 16), np.float32),
        "resnet.encoder.stages.4.layers.0.layer.0.convolution.weight": np.zeros((1, 1, 3, 3)),
    }
    with pytest.raises(CheckpointError) as caught:
        PretrainedWeights(published.write_model(tmp_path, golden, **changes))
    text = str(caught.value)
    assert "has 3 tensors that do not fit the resnet" in text
    for words in (f"{stats} ", "is missing", "is 7 x 16, and config.json says 5 x 16", "surplus"):
        assert words in text


def test_a_model_finds_the_family_of_its_function():
    resnet = ResNet(preset="resnet18")
    assert family_of(resnet).name == "resnet"
    assert family_of(resnet, "timm_resnet").name == "timm_resnet"
    half = (0.5, 0.5, 0.5)
    pixels = Pixels(channels=3, mean=half, std=half)
    changed = dataclasses.replace(resnet, image=(28, 28, 1), pixels=pixels)
    assert family_of(changed).name == "resnet"
    assert family_of(ViT(preset="vit-b16"), "timm_vit").name == "timm_vit"
    assert family_of(ViT(image=(8, 8, 3), classes=2)).name == "vit"
    assert family_of(EfficientNetLite(preset="lite2")).name == "efficientnet_lite"
    for model, field in {
        ResNet(preset="resnet18", stem="cifar"): "stem=cifar",
        ViT(preset="vit-b16", pool="mean"): "pool=mean",
    }.items():
        with pytest.raises(CheckpointError, match=f"no published family computes .* {field}"):
            family_of(model)
    with pytest.raises(CheckpointError, match="no published family computes"):
        family_of(EfficientNetLite(image=(8, 8, 3), classes=2, features=64))


def test_pixels_that_conflict_are_refused():
    with pytest.raises(ValueError, match="Set both, such as height=8 width=8"):
        Pixels(height=8)
    with pytest.raises(ValueError, match="Give both"):
        Pixels(mean=(0.5,))
    with pytest.raises(ValueError, match=r"Set data.channels=1"):
        ResNet(image=(8, 8, 3), pixels=Pixels(channels=1))
    with pytest.raises(ValueError, match=r"model.pixels.mean=\[0.5, 0.5, 0.5\]"):
        ResNet(image=(8, 8, 3), pixels=Pixels(mean=(0.5,), std=(0.5,)))
    with pytest.raises(ValueError, match="do not divide an image of 10 x 10"):
        ViT(image=(8, 8, 3), classes=2, patch=4, pixels=Pixels(height=10, width=10))


def test_the_names_of_the_other_package_are_those_of_timm(tmp_path):
    """The tensors of efficientnet-lite-pytorch, in the order in which both list the layers."""
    golden = published.golden("efficientnet_lite")
    source = PretrainedWeights(published.write_model(tmp_path / "timm", golden))
    ends = {"conv_pw": "_expand_conv", "conv_dw": "_depthwise_conv", "conv_pwl": "_project_conv",
            "bn1": "_bn0", "bn2": "_bn1", "bn3": "_bn2"}  # fmt: skip
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    outside = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1",
               "classifier": "_fc"}  # fmt: skip
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
