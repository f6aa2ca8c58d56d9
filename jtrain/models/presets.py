"""Published models: presets of their values, and config classes that take values of one."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from jtrain.config.configclass import configclass
from jtrain.config.schema import key_of
from jtrain.core.model import Model
from jtrain.core.placement import Placement
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
    "multi_token_depth": 0,
    "vocab": 50257,
    "context": 1024,
    "depth": 0,
    "aspect": 64,
    "layers": 12,
    "heads": 12,
    "width": 768,
}


_LLAMA_SIZES = ("vocab", "context", "layers", "heads", "kv_heads", "width", "hidden")


def _llama(base: float, *sizes: int, **others: Any) -> Mapping[str, Any]:
    """Return the values of a Llama: Touvron et al. 2023, https://arxiv.org/abs/2302.13971."""
    rotary = {"kind": "rotary", "base": base, "scaling": {"kind": "none"}}
    own = {"positions": rotary, "norm": "rms", "activation": "swiglu", "bias": False}
    sized = dict(zip(_LLAMA_SIZES, sizes, strict=True))
    return {**_GPT2, **own, "tied": False, **sized, **others}


_MIXTRAL = {"kind": "dropless", "count": 8, "top_k": 2, "weights": "chosen"}
LANGUAGE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "layers": 24, "heads": 16, "width": 1024},
    # https://huggingface.co/meta-llama/Llama-2-7b
    "llama2-7b": _llama(1e4, 32000, 4096, 32, 32, 0, 4096, 11008),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama3-8b": _llama(5e5, 128256, 8192, 32, 32, 8, 4096, 14336),
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": _llama(1e5, 49152, 8192, 30, 9, 3, 576, 1536, tied=True),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1; Jiang et al. 2024
    "mixtral-8x7b": _llama(1e6, 32000, 32768, 32, 32, 8, 4096, 14336, experts=_MIXTRAL),
}


@configclass
class Published:
    """Base of a config class with values of a published model: its `preset`, or a folder (`from`).

    Values given beside these win.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    dials: ClassVar[tuple[str, ...]] = ()
    """Keys that imply others, unless the first of them is 0."""
    kind: str = ""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder as Hugging Face lays it out, `org/name@revision` on its Hub, or a GGUF file of a
    decoder: a new run takes its weights, and its values where none are given beside it. In Python:
    pretrained=PATH. Empty: none."""

    @classmethod
    def read_values(cls, path: str) -> Mapping[str, Any]:
        """Return the values of a published model; see `jtrain.models.pretrained`.

        Raises:
            CheckpointError: if the path has no model of this kind.
        """
        from jtrain.models.pretrained.source import read_values

        return read_values(path, cls.kind)

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values that those given imply by `dials`."""
        del values
        return {}

    @model_validator(mode="before")
    @classmethod
    def _add_published(cls, given: Any) -> Any:
        called = isinstance(given, ArgsKwargs)
        values = given.kwargs or {} if called else given
        if not isinstance(values, Mapping):
            return given
        values = cls._with_pretrained(values)
        values = {**cls.implied(values), **values}
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


def build_network(config: Any, placement: Placement) -> Model:
    """Build the flax module that `network` of a config names, as two functions."""
    from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built

    file, name = config.network.split(":")
    module = importlib.import_module(f"jtrain.models.networks.{file}")
    return from_nnx(lambda rngs: getattr(module, name)(config, placement, rngs))
