"""Residual networks: ResNet of `transformers`, and of timm and torchvision."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.checks import COUNT, SIZE, Supported, is_list_of
from jtrain.models.pretrained.families.entries import get
from jtrain.models.pretrained.families.images import (
    COUNTERS,
    IMAGE_ENTRIES,
    convolution_leaves,
    label_count,
    label_entries,
)
from jtrain.models.pretrained.families.llama import linear_leaves
from jtrain.models.pretrained.families.timm import (
    TIMM_ENTRIES,
    timm_classes,
    timm_entries,
    timm_image,
)
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values

EXPANSION = 4  # of the last convolution of a bottleneck
SIDE = 224  # of images, where nothing says another; no parameter depends on it
_DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
TIMM = {
    f"resnet{layers}": {
        "blocks": blocks,
        "bottleneck": layers >= 50,
        "width": 64,
        "stem": "imagenet",
        "norm": "batch",
    }
    for layers, blocks in _DEPTHS.items()
}

ENTRIES: Supported = {
    **IMAGE_ENTRIES,
    "hidden_act": ("relu",),
    "layer_type": ("bottleneck", "basic"),
    "downsample_in_first_stage": (False,),
    "downsample_in_bottleneck": (False,),
    "embedding_size": (SIZE,),
    "hidden_sizes": (is_list_of(SIZE),),
    "depths": (is_list_of(COUNT),),
}


def _values(hf: HFConfig) -> Values:
    bottleneck = hf.get("layer_type", "bottleneck") == "bottleneck"
    width, channels = get(hf, "embedding_size", 64), list(get(hf, "hidden_sizes"))
    doubled = _channels(width, bottleneck, len(channels))
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


def _channels(width: int, bottleneck: bool, stages: int) -> list[int]:
    return [width * 2**i * (EXPANSION if bottleneck else 1) for i in range(stages)]


def _entries(model: Any) -> Values:
    stages = len(model.blocks)
    names = [f"stage{i}" for i in range(1, stages + 1)]
    return {
        "embedding_size": model.width,
        "hidden_sizes": _channels(model.width, model.bottleneck, stages),
        "depths": list(model.blocks),
        "layer_type": "bottleneck" if model.bottleneck else "basic",
        "num_channels": model.shape[2],
        "hidden_act": "relu",
        "stage_names": ["stem", *names],
        "out_features": names[-1:],
        "out_indices": [stages],
        **label_entries(model.classes),
    }


class _Names(NamedTuple):
    """Names of the published layers; `convolution` and `norm` are ends of a block's."""

    stem: str
    stem_norm: str
    block: Callable[[int, int], str]  # stage and number, from 0
    convolution: Callable[[int], str]
    norm: Callable[[int], str]
    short: str
    short_norm: str
    head: str


HF_NAMES = _Names(
    stem="resnet.embedder.embedder.convolution",
    stem_norm="resnet.embedder.embedder.normalization",
    block=lambda stage, number: f"resnet.encoder.stages.{stage}.layers.{number}",
    convolution=lambda i: f"layer.{i}.convolution",
    norm=lambda i: f"layer.{i}.normalization",
    short="shortcut.convolution",
    short_norm="shortcut.normalization",
    head="classifier.1",
)
TIMM_NAMES = _Names(
    stem="conv1",
    stem_norm="bn1",
    block=lambda stage, number: f"layer{stage + 1}.{number}",
    convolution=lambda i: f"conv{i + 1}",
    norm=lambda i: f"bn{i + 1}",
    short="downsample.0",
    short_norm="downsample.1",
    head="fc",
)


def _leaves(model: Any, names: _Names) -> Iterator[Leaf]:
    yield from convolution_leaves("stem", names.stem, "norm", names.stem_norm)
    blocks = [(stage, n) for stage, count in enumerate(model.blocks) for n in range(count)]
    for index, (stage, number) in enumerate(blocks):
        ours, theirs = f"blocks/{index}", names.block(stage, number)
        for i in range(3 if model.bottleneck else 2):
            yield from convolution_leaves(
                f"{ours}/convolutions/{i}",
                f"{theirs}.{names.convolution(i)}",
                f"{ours}/norms/{i}",
                f"{theirs}.{names.norm(i)}",
            )
        if number == 0 and (stage or model.bottleneck):
            yield from convolution_leaves(
                f"{ours}/short",
                f"{theirs}.{names.short}",
                f"{ours}/norm_short",
                f"{theirs}.{names.short_norm}",
            )
    channels = _channels(model.width, model.bottleneck, len(model.blocks))[-1]
    yield from linear_leaves("head", names.head, channels, model.classes)


RESNET = Family(
    name="resnet",
    architecture="ResNetForImageClassification",
    kind="resnet",
    entries=ENTRIES,
    values=_values,
    hf=_entries,
    leaves=lambda model: _leaves(model, HF_NAMES),
    prefix="resnet.",
    ignored=COUNTERS,
)
TIMM_RESNET = Family(
    name="timm_resnet",
    architecture="",
    kind="resnet",
    timm=frozenset(TIMM),
    entries={**TIMM_ENTRIES, "global_pool": ("avg", "", None)},
    values=lambda hf: {
        **TIMM[hf["architecture"]],
        "image": timm_image(hf, (SIDE, SIDE, 3)),
        "classes": timm_classes(hf),
    },
    hf=lambda model: timm_entries(TIMM, model, head="fc", first="conv1"),
    leaves=lambda model: _leaves(model, TIMM_NAMES),
    ignored=COUNTERS,
)
