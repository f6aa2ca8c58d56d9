"""EfficientNet-lite as timm names it, and as the package efficientnet-lite-pytorch does."""

import re
from collections.abc import Iterator
from typing import Any

from jtrain.models.presets.vision import LITE_PRESETS
from jtrain.models.pretrained.families.images import COUNTERS, convolution_leaves
from jtrain.models.pretrained.families.llama import linear_leaves
from jtrain.models.pretrained.families.timm import (
    TIMM_ENTRIES,
    timm_classes,
    timm_entries,
    timm_image,
)
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values

_BEGINNING = "tf_efficientnet_"
# The converted weights of TensorFlow, with its padding; timm's own `efficientnet_lite` pad evenly.
TIMM = {
    f"{_BEGINNING}{name}": {
        key: value for key, value in preset.items() if key not in {"classes", "image"}
    }
    for name, preset in LITE_PRESETS.items()
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


def _values(hf: HFConfig) -> Values:
    name = hf["architecture"]
    image = LITE_PRESETS[name.removeprefix(_BEGINNING)]["image"]
    return {**TIMM[name], "image": timm_image(hf, image), "classes": timm_classes(hf)}


def _leaves(model: Any) -> Iterator[Leaf]:
    yield from convolution_leaves("stem", "conv_stem", "norm", "bn1")
    for index, (stage, number) in enumerate(_blocks(model)):
        for our, their, norm in _LAYERS if stage else _FIRST:
            ours, theirs = f"blocks/{index}", f"blocks.{stage}.{number}"
            yield from convolution_leaves(
                f"{ours}/{our}", f"{theirs}.{their}", f"{ours}/norm_{our}", f"{theirs}.{norm}"
            )
    yield from convolution_leaves("features", "conv_head", "norm_features", "bn2")
    yield from linear_leaves("head", "classifier", model.features, model.classes)


def _blocks(model: Any) -> list[tuple[int, int]]:
    return [(stage, n) for stage, count in enumerate(model.blocks) for n in range(count)]


def _rename(model: Any, name: str) -> str:
    """Return timm's name for one of the other package."""
    if found := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
        index, layer, end = int(found[1]), found[2], found[3]
        blocks = _blocks(model)
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
    timm=frozenset(TIMM),
    mean=0.5,
    entries={**TIMM_ENTRIES, "global_pool": ("avg", "", None)},
    values=_values,
    hf=lambda model: timm_entries(TIMM, model, head="classifier", first="conv_stem"),
    leaves=_leaves,
    ignored=COUNTERS,
    rename=_rename,
)
