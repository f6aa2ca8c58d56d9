"""Entries of config.json that change the function: computed, or refused by name."""

import functools
from typing import Any

import published_models as published
import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families import FAMILIES, build_model, family_name


@functools.cache
def config(name: str) -> dict[str, Any]:
    return published.golden(name)["config"]


def build(name: str, changes: dict[str, Any], *without: str) -> Any:
    """Return our config for a golden's config.json with some entries changed or left out."""
    hf = {key: x for key, x in config(name).items() if key not in without} | changes
    return build_model(FAMILIES[family_name(hf)], hf)


LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type="),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
               "layer_types": None}, "use_sliding_window=True"),
    ("gemma2", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern=3"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx="),
    ("bert", {"is_decoder": True}, "is_decoder=True"),
    ("timm_vit", {"model_args": {"img_size": 256}}, "model_args="),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "entry"), REFUSED)
def test_an_entry_of_another_function_is_refused_by_name(name, changes, entry):
    with pytest.raises(CheckpointError) as error:
        build(name, changes)
    assert entry in str(error.value)


PASSED = [
    ("llama", {"rope_scaling": {"rope_type": "default"}, "quantization_config": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}),
    ("gpt2", {"num_hidden_layers": 2, "activation_function": "gelu_pytorch_tanh"}),
]


@pytest.mark.parametrize(("name", "changes"), PASSED)
def test_an_entry_without_an_effect_passes(name, changes):
    assert build(name, changes) == build(name, {})


def test_entries_have_the_priority_and_the_defaults_of_transformers():
    rope = {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    assert build("llama", rope).positions.scaling.factor == 2.0
    assert build("llama", rope).positions.base == 10000.0
    assert build("llama", {"rope_theta": 7.0}).positions.base == 10000.0  # that of the object
    context = build("llama31", {"original_max_position_embeddings": 8}).positions.scaling.context
    assert context == 8
    heads = {"num_attention_heads": 16, "head_dim": 4}
    assert build("mistral", heads, "num_key_value_heads").kv_heads == 8
    assert build("llama", heads, "num_key_value_heads").kv_heads == 16
    assert build("qwen3", {}, "head_dim").head_size == 128
    scaled = {"rope_scaling": {"factor": 4.0}}  # over the object of the layers without a window
    assert build("gemma3", scaled).positions.scaling.factor == 4.0
