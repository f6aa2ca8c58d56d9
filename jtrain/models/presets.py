"""Values of published models by the names of presets, and the divisors of a width."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from jtrain.errors import ConfigError

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


# The published variants, with the images of timm's `tf_efficientnet_lite0` and the others.
EFFICIENTNET_LITE_PRESETS: Mapping[str, Mapping[str, Any]] = {
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


def check_heads(width: int, heads: int) -> None:
    """Raise ConfigError unless the heads divide the width of a model."""
    if width % heads:
        near = nearest_divisor(width, heads)
        raise ConfigError(f"{heads} heads do not divide width {width}. Nearest: heads={near}.")


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to `wanted`."""
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return min(divisors, key=lambda n: abs(n - wanted))
