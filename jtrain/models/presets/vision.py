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
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    name = values.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        near = difflib.get_close_matches(name.lower(), presets, 1, cutoff=0.3)
        hint = f" Did you mean preset={near[0]}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}.{hint}")
    merged = {**(presets.get(name, {}) if isinstance(name, str) else {}), **values}
    return ArgsKwargs(given.args, merged) if called else merged
