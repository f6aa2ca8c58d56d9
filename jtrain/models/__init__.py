"""Models as pure functions: configs of networks, and adapters for models of other libraries.

Names are imported on first use, so that reading a config imports no flax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtrain.models.adapters import mean_of_slices as mean_of_slices
    from jtrain.models.adapters.libraries import from_equinox as from_equinox
    from jtrain.models.adapters.libraries import from_haiku as from_haiku
    from jtrain.models.adapters.libraries import from_linen as from_linen
    from jtrain.models.adapters.nnx import from_nnx as from_nnx
    from jtrain.models.classifiers import CNN as CNN
    from jtrain.models.classifiers import MLP as MLP
    from jtrain.models.classifiers import EfficientNetLite as EfficientNetLite
    from jtrain.models.classifiers import ResNet as ResNet
    from jtrain.models.classifiers import ViT as ViT
    from jtrain.models.transformer import Transformer as Transformer

_MODULES = {
    "CNN": "classifiers",
    "EfficientNetLite": "classifiers",
    "MLP": "classifiers",
    "ResNet": "classifiers",
    "Transformer": "transformer",
    "ViT": "classifiers",
    "from_equinox": "adapters.libraries",
    "from_haiku": "adapters.libraries",
    "from_linen": "adapters.libraries",
    "from_nnx": "adapters.nnx",
    "mean_of_slices": "adapters",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'jtrain.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jtrain.models.{_MODULES[name]}"), name)
