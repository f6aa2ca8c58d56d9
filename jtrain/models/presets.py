"""Published models: presets of their values, and config classes that take values of one."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from jtrain.config.configclass import configclass
from jtrain.config.schema import key_of
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean

LanguagePreset: TypeAlias = Literal[
    "none", "gpt2", "gpt2-medium", "llama2-7b", "llama3-8b", "smollm2-135m", "mixtral-8x7b"
]

# Every preset sets all values that define the architecture; none is left to a config file.
# Radford et al. 2019; https://huggingface.co/openai-community/gpt2
_GPT2 = {
    "positions": {"kind": "learned"},
    "norm": "layer",
    "epsilon": 1e-5,
    "activation": "gelu",
    "bias": True,
    "tied": True,
    "kv_heads": 0,
    "head_size": 0,
    "hidden": 0,
    "qkv_bias": False,
    "qk_norm": False,
    "post_norm": False,
    "zero_centered": False,
    "embedding_scale": 1.0,
    "window": None,
    "global_every": 0,
    "attention_cap": None,
    "attention_scale": None,
    "logit_cap": None,
    "experts": {"kind": "none"},
    "vocab": 50257,
    "context": 1024,
    "layers": 12,
    "heads": 12,
    "width": 768,
}
# Touvron et al. 2023, https://arxiv.org/abs/2302.13971
_LLAMA = {
    **_GPT2,
    "positions": {"kind": "rotary", "base": 10000.0, "scaling": {"kind": "none"}},
    "norm": "rms",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
}
LANGUAGE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "layers": 24, "heads": 16, "width": 1024},
    # https://huggingface.co/meta-llama/Llama-2-7b
    "llama2-7b": {
        **_LLAMA,
        "vocab": 32000,
        "context": 4096,
        "layers": 32,
        "heads": 32,
        "width": 4096,
        "hidden": 11008,
    },
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama3-8b": {
        **_LLAMA,
        "vocab": 128256,
        "context": 8192,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "width": 4096,
        "hidden": 14336,
        "positions": {"kind": "rotary", "base": 500000.0, "scaling": {"kind": "none"}},
    },
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": {
        **_LLAMA,
        "vocab": 49152,
        "context": 8192,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "width": 576,
        "hidden": 1536,
        "positions": {"kind": "rotary", "base": 100000.0, "scaling": {"kind": "none"}},
        "tied": True,
    },
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1; Jiang et al. 2024
    "mixtral-8x7b": {
        **_LLAMA,
        "vocab": 32000,
        "context": 32768,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "width": 4096,
        "hidden": 14336,
        "positions": {"kind": "rotary", "base": 1000000.0, "scaling": {"kind": "none"}},
        "experts": {"kind": "dropless", "count": 8, "top_k": 2, "weights": "chosen"},
    },
}


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


@configclass
class Published:
    """Base of a config class with values of a published model: its `preset`, or a folder (`from`).

    Values given beside these win.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    kind: Any

    @classmethod
    def read_values(cls, path: str) -> Mapping[str, Any]:
        """Return the values of a published model; see `jtrain.models.pretrained`.

        Raises:
            CheckpointError: if the path has no model of this kind.
        """
        from jtrain.models.pretrained.source import read_values

        return read_values(path, cls.kind)

    @model_validator(mode="before")
    @classmethod
    def _add_published(cls, given: Any) -> Any:
        called = isinstance(given, ArgsKwargs)
        values = given.kwargs or {} if called else given
        if not isinstance(values, Mapping):
            return given
        values = cls._with_pretrained(values)
        if cls.presets:
            values = _with_preset(values, cls.presets, called=called)
        return ArgsKwargs(given.args, dict(values)) if called else values

    @classmethod
    def _with_pretrained(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values over those of the model that they name.

        Where all values are given nothing is read, so a stored config outlives the folder.

        Raises:
            CheckpointError: if the path has no model of this class.
        """
        path = values.get("from") or values.get("pretrained")
        names: Mapping[str, Any] = getattr(cls, "__pydantic_fields__")  # noqa: B009
        missing = {name for name in names if name not in values and key_of(cls, name) not in values}
        if not isinstance(path, str) or not path or not missing:
            return values
        found = cls.read_values(path)
        merged = {**found, **values}
        for key, theirs in found.items():  # one value of several beside the others of the folder
            nested = isinstance(theirs, dict) and "kind" not in theirs
            if nested and isinstance(merged[key], Mapping):
                merged[key] = {**theirs, **merged[key]}
        return merged


def _with_preset(
    values: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]], *, called: bool
) -> Mapping[str, Any]:
    """Return the values over those of the preset that they name.

    An unknown name in a config file is left to the check of its field, which knows the key and the
    source.

    Raises:
        ConfigError: with the nearest name, if a call names a preset that does not exist.
    """
    values = _with_tuples(values)  # JSON has only lists, and the check of a tuple field is strict
    name = values.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        hint = did_you_mean(name.lower(), presets)
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}{hint or '.'}")
    return {**(presets.get(name, {}) if isinstance(name, str) else {}), **values}


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tuples for lists, those of the configs in it too."""

    def change(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_tuples(value)
        return tuple(value) if isinstance(value, list) else value

    return {key: change(value) for key, value in values.items()}


def check_heads(width: int, heads: int) -> None:
    """Raise ConfigError unless the heads divide the width of a model."""
    if width % heads:
        near = nearest_divisor(width, heads)
        raise ConfigError(f"{heads} heads do not divide width {width}. Nearest: heads={near}.")


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to `wanted`."""
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return min(divisors, key=lambda n: abs(n - wanted))
