"""Convolutional networks: ResNet of `transformers`, timm and torchvision; EfficientNet-lite."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.presets import EFFICIENTNET_LITE_PRESETS
from jtrain.models.pretrained.families.entries import COMMON, get
from jtrain.models.pretrained.families.images import (
    COUNTERS,
    TIMM_ENTRIES,
    convolution_leaves,
    label_count,
    label_entries,
    timm_entries,
    timm_values,
)
from jtrain.models.pretrained.family import (
    Family,
    HFConfig,
    Leaf,
    Supported,
    Values,
    linear_leaves,
)

EXPANSION = 4  # of the last convolution of a bottleneck
SIDE = 224  # of images, where nothing says another; no parameter depends on it
_DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
TIMM_RESNETS = {
    f"resnet{layers}": {
        "blocks": blocks,
        "bottleneck": layers >= 50,
        "width": 64,
        "stem": "imagenet",
        "norm": "batch",
    }
    for layers, blocks in _DEPTHS.items()
}

RESNET_ENTRIES: Supported = {
    **COMMON,
    "hidden_act": ("relu",),
    "layer_type": ("bottleneck", "basic"),
    "downsample_in_first_stage": (False,),
    "downsample_in_bottleneck": (False,),
}


def _resnet_values(hf: HFConfig) -> Values:
    bottleneck = hf.get("layer_type", "bottleneck") == "bottleneck"
    width, channels = get(hf, "embedding_size", 64), list(get(hf, "hidden_sizes"))
    doubled = _resnet_channels(width, bottleneck, len(channels))
    if channels != doubled:
        raise CheckpointError(
            f"config.json has hidden_sizes={channels} and embedding_size={width}, and jtrain's "
            f"stages double the channels from there: {doubled}. Use a model with such stages."
        )
    return {
        "image": (SIDE, SIDE, hf.get("num_channels", 3)),
        "blocks": tuple(get(hf, "depths")),
        "bottleneck": bottleneck,
        "width": width,
        "stem": "imagenet",
        "norm": "batch",
        "classes": label_count(hf),
    }


def _resnet_channels(width: int, bottleneck: bool, stages: int) -> list[int]:
    return [width * 2**i * (EXPANSION if bottleneck else 1) for i in range(stages)]


def _resnet_entries(model: Any) -> Values:
    stages = len(model.blocks)
    names = [f"stage{i}" for i in range(1, stages + 1)]
    return {
        "embedding_size": model.width,
        "hidden_sizes": _resnet_channels(model.width, model.bottleneck, stages),
        "depths": list(model.blocks),
        "layer_type": "bottleneck" if model.bottleneck else "basic",
        "num_channels": model.shape[2],
        "hidden_act": "relu",
        "stage_names": ["stem", *names],
        "out_features": names[-1:],
        "out_indices": [stages],
        **label_entries(model.classes),
    }


# Names of the published layers; in a block, of the convolution number {0} from 0, {1} from 1.
HF_NAMES = {
    "stem": ("resnet.embedder.embedder.convolution", "resnet.embedder.embedder.normalization"),
    "block": "resnet.encoder.stages.{0}.layers.{2}",
    "convolution": ("layer.{0}.convolution", "layer.{0}.normalization"),
    "short": ("shortcut.convolution", "shortcut.normalization"),
    "head": "classifier.1",
}
TIMM_NAMES = {
    "stem": ("conv1", "bn1"),
    "block": "layer{1}.{2}",
    "convolution": ("conv{1}", "bn{1}"),
    "short": ("downsample.0", "downsample.1"),
    "head": "fc",
}


def _resnet_leaves(model: Any, names: Mapping[str, Any]) -> Iterator[Leaf]:
    yield from convolution_leaves("stem", "norm", *names["stem"])
    for index, (stage, number) in enumerate(_block_numbers(model)):
        ours, theirs = f"blocks/{index}", names["block"].format(stage, stage + 1, number)
        for i in range(3 if model.bottleneck else 2):
            layers = (f"{theirs}.{name.format(i, i + 1)}" for name in names["convolution"])
            yield from convolution_leaves(f"{ours}/convolutions/{i}", f"{ours}/norms/{i}", *layers)
        if number == 0 and (stage or model.bottleneck):
            layers = (f"{theirs}.{name}" for name in names["short"])
            yield from convolution_leaves(f"{ours}/short", f"{ours}/norm_short", *layers)
    channels = _resnet_channels(model.width, model.bottleneck, len(model.blocks))[-1]
    yield from linear_leaves("head", names["head"], channels, model.classes)


RESNET = Family(
    name="resnet",
    architecture="ResNetForImageClassification",
    kind="resnet",
    entries=RESNET_ENTRIES,
    values=_resnet_values,
    hf=_resnet_entries,
    leaves=lambda model: _resnet_leaves(model, HF_NAMES),
    prefix="resnet.",
    ignored=COUNTERS,
)
TIMM_RESNET = Family(
    name="timm_resnet",
    architecture="",
    kind="resnet",
    timm=frozenset(TIMM_RESNETS),
    entries={**TIMM_ENTRIES, "global_pool": ("avg", "", None)},
    values=lambda hf: timm_values(
        hf, {**TIMM_RESNETS[hf["architecture"]], "image": (SIDE, SIDE, 3)}
    ),
    hf=lambda model: timm_entries(TIMM_RESNETS, model, head="fc", first="conv1"),
    leaves=lambda model: _resnet_leaves(model, TIMM_NAMES),
    ignored=COUNTERS,
)


_BEGINNING = "tf_efficientnet_"
# The converted weights of TensorFlow, with its padding; timm's own `efficientnet_lite` pad evenly.
TIMM_LITES = {
    f"{_BEGINNING}{name}": {
        key: value for key, value in preset.items() if key not in {"classes", "image"}
    }
    for name, preset in EFFICIENTNET_LITE_PRESETS.items()
}
# Layers of a block: ours, and their ends in timm with an expansion and without one.
_LAYERS = (
    ("expand", "conv_pw", "bn1"),
    ("depthwise", "conv_dw", "bn2"),
    ("project", "conv_pwl", "bn3"),
)
_FIRST = (("depthwise", "conv_dw", "bn1"), ("project", "conv_pw", "bn2"))
# The other package: a norm's number does not depend on whether a block expands.
_OTHER = {
    "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2",
    "_project_conv": "conv_pwl", "_bn2": "bn3",
}  # fmt: skip
_OTHER_FIRST = {
    "_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2",
}  # fmt: skip
_OTHER_OUTSIDE = {
    "_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2",
    "_fc": "classifier",
}  # fmt: skip


def _lite_values(hf: HFConfig) -> Values:
    name = hf["architecture"]
    image = EFFICIENTNET_LITE_PRESETS[name.removeprefix(_BEGINNING)]["image"]
    return timm_values(hf, {**TIMM_LITES[name], "image": image})


def _lite_leaves(model: Any) -> Iterator[Leaf]:
    yield from convolution_leaves("stem", "norm", "conv_stem", "bn1")
    for index, (stage, number) in enumerate(_block_numbers(model)):
        ours, theirs = f"blocks/{index}", f"blocks.{stage}.{number}"
        for our, their, norm in _LAYERS if stage else _FIRST:
            layers = f"{theirs}.{their}", f"{theirs}.{norm}"
            yield from convolution_leaves(f"{ours}/{our}", f"{ours}/norm_{our}", *layers)
    yield from convolution_leaves("features", "norm_features", "conv_head", "bn2")
    yield from linear_leaves("head", "classifier", model.features, model.classes)


def _block_numbers(model: Any) -> list[tuple[int, int]]:
    return [(stage, n) for stage, count in enumerate(model.blocks) for n in range(count)]


def _lite_rename(model: Any, name: str) -> str:
    """Return timm's name for one of the other package."""
    if found := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
        index, layer, end = int(found[1]), found[2], found[3]
        blocks = _block_numbers(model)
        if index >= len(blocks):
            return name
        stage, number = blocks[index]
        ends = _OTHER if stage else _OTHER_FIRST
        return f"blocks.{stage}.{number}.{ends.get(layer, layer)}.{end}"
    layer, _, end = name.partition(".")
    return f"{_OTHER_OUTSIDE.get(layer, layer)}.{end}"


EFFICIENTNET_LITE = Family(
    name="efficientnet_lite",
    architecture="",
    kind="efficientnet_lite",
    timm=frozenset(TIMM_LITES),
    mean=0.5,
    entries={**TIMM_ENTRIES, "global_pool": ("avg", "", None)},
    values=_lite_values,
    hf=lambda model: timm_entries(TIMM_LITES, model, head="classifier", first="conv_stem"),
    leaves=_lite_leaves,
    ignored=COUNTERS,
    rename=_lite_rename,
)
