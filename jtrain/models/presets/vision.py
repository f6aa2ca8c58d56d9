"""Presets of published image classifiers, as values of a ResNet and of a ViT.

A test counts the parameters of each; the values are those of torchvision and timm.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic_core import ArgsKwargs

from jtrain.errors import ConfigError

ResNetPreset: TypeAlias = Literal["none", "resnet18", "resnet34", "resnet50"]
ViTPreset: TypeAlias = Literal["none", "vit-s16", "vit-b16"]
LitePreset: TypeAlias = Literal["none", "lite0", "lite1", "lite2", "lite3", "lite4"]

_IMAGENET = {"image": (224, 224, 3), "classes": 1000}
# He et al. 2016, https://arxiv.org/abs/1512.03385, table 1
RESNET_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "resnet18": {**_IMAGENET, "blocks": (2, 2, 2, 2)},
    "resnet34": {**_IMAGENET, "blocks": (3, 4, 6, 3)},
    "resnet50": {**_IMAGENET, "blocks": (3, 4, 6, 3), "bottleneck": True},
}
# Touvron et al. 2021, https://arxiv.org/abs/2012.12877, table 1 (the small one); Dosovitskiy et al.
# 2021, https://arxiv.org/abs/2010.11929, table 1
VIT_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vit-s16": {**_IMAGENET, "patch": 16, "layers": 12, "heads": 6, "width": 384},
    "vit-b16": {**_IMAGENET, "patch": 16, "layers": 12, "heads": 12, "width": 768},
}

# The published variants, with the images of timm's `tf_efficientnet_lite0` and the others.
LITE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    f"lite{i}": {
        "image": (side, side, 3),
        "classes": 1000,
        "stem": 32,
        "widths": widths,
        "blocks": blocks,
        "features": 1280,
    }
    for i, (side, widths, blocks) in enumerate(
        (
            (224, (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
            (240, (16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1)),
            (260, (16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
            (300, (24, 32, 48, 96, 136, 232, 384), (1, 3, 3, 5, 5, 6, 1)),
            (380, (24, 32, 56, 112, 160, 272, 448), (1, 4, 4, 6, 6, 8, 1)),
        )
    )
}


def with_preset(given: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the values given to a config class, over those of the preset that they name.

    For a `@model_validator(mode="before")`: `given` is the argument of the validator. An unknown
    name in a config file is left to the check of its field, which knows the key and the source.

    Raises:
        ConfigError: with the nearest name, if the preset does not exist.
    """
    called = isinstance(given, ArgsKwargs)
    values = given.kwargs or {} if called else given
    if not isinstance(values, Mapping):
        return given
    # JSON has only lists, and the check of a tuple field is strict.
    values = _with_tuples(values)
    name = values.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        near = difflib.get_close_matches(name.lower(), presets, 1, cutoff=0.3)
        hint = f" Did you mean preset={near[0]}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}.{hint}")
    merged = {**(presets.get(name, {}) if isinstance(name, str) else {}), **values}
    return ArgsKwargs(given.args, merged) if called else merged


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tuples for lists, those of the configs in it too."""

    def change(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_tuples(value)
        return tuple(value) if isinstance(value, list) else value

    return {key: change(value) for key, value in values.items()}
