"""Presets of published image classifiers, as values of a ResNet and of a ViT.

A test counts the parameters of each; the values are those of torchvision and timm.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

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
