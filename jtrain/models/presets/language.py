"""Presets of published language models, as values of a Transformer.

A test counts the parameters of each; the values are those of the published configurations.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

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
