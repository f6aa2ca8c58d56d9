"""Entries of config.json that change the function: computed, or refused by name."""

import functools
import math
from typing import Any

import published_models as published
import pytest
from cases import by_name

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.registry import FAMILIES, build_model, family_name

NAMES = published.names()


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
    ("llama", {"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters.full_attention="),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
    ("llama", {"attention_bias": "false"}, "attention_bias="),
    ("llama", {"is_causal": False}, "is_causal=False"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
    ("llama31", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    ("mistral", {"use_bidirectional_attention": True}, "use_bidirectional_attention="),
    ("mixtral", {"num_experts": 8}, "num_experts=8"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
               "layer_types": None}, "use_sliding_window=True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention="),
    ("gemma2", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern=3"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta="),
    ("gemma3", {"layer_types": ["full_attention"] * 5}, "layer_types="),
    ("gpt2", {"num_hidden_layers": 1}, "num_hidden_layers=1"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx="),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type="),
    ("bert", {"is_decoder": True}, "is_decoder=True"),
    ("vit", {"head_dim": 8}, "head_dim=8"),
    ("resnet", {"hidden_act": "gelu"}, "hidden_act="),
    ("timm_vit", {"model_args": {"img_size": 256}}, "model_args="),
    ("timm_vit", {"global_pool": "avg"}, "global_pool="),
    ("timm_resnet", {"pretrained_cfg": {"input_size": [3, 32]}}, "pretrained_cfg.input_size="),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "entry"), REFUSED)
def test_an_entry_of_another_function_is_refused_by_name(name, changes, entry):
    with pytest.raises(CheckpointError) as error:
        build(name, changes)
    assert entry in str(error.value)


PASSED = [
    ("llama", {"rope_scaling": {"rope_type": "default"}, "quantization_config": None}),
    ("llama", {"hidden_act": "swish", "sliding_window": 4, "use_cache": False}),
    ("mistral", {"layer_types": ["sliding_attention"] * 2}),
    ("mixtral", {"num_experts": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}),
    ("gemma2", {"hidden_act": "gelu", "partial_rotary_factor": 1}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gpt2", {"num_hidden_layers": 2, "activation_function": "gelu_pytorch_tanh"}),
    ("bert", {"hidden_act": "gelu_python", "position_embedding_type": None}),
    ("timm_vit", {"global_pool": "token", "model_args": {}}),
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


WILD = (None, True, -1, 0, 1.5, 10**30, 10**400, math.inf, math.nan, "x" * 99, [], [[]], {}, [-1])


def wild(name: str) -> list[dict[str, Any]]:
    """Return changes of a config.json: its entries, and those of its objects, of wild shapes."""
    hf, family = config(name), FAMILIES[family_name(config(name))]
    keys = sorted({*hf, *family.entries} - {"model_type", "architecture"})
    found: list[dict[str, Any]] = [{key: value} for key in keys for value in WILD]
    for key, inner in hf.items():
        if isinstance(inner, dict) and key not in ("id2label", "label2id"):  # names of classes
            found += [{key: {**inner, k: value}} for k in inner for value in WILD]
            found += [{key: {k: x for k, x in inner.items() if k != left}} for left in inner]
    return found


def refusal(name: str, changes: dict[str, Any]) -> str:
    try:
        build(name, changes)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", by_name(NAMES, {"llama31", "resnet"}, pytest.mark.thorough))
def test_a_wild_shape_is_refused_by_its_entry(name):
    for changes in wild(name):
        (key,) = changes
        text = refusal(name, changes)
        assert not text or key in text or "contradicts itself" in text, changes


@pytest.mark.parametrize(
    ("name", "changes", "entry"),
    [
        ("llama31", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ("llama", {"rope_theta": None}, "rope_theta=None"),
        ("llama31", {"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ("llama", {"num_attention_heads": 3}, "2 kv_heads do not divide 3 heads"),
        ("resnet", {"depths": [10**9]}, "depths=[1000000000]"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    ],
)  # fmt: skip
def test_the_message_has_the_entry(name, changes, entry):
    with pytest.raises(CheckpointError) as error:
        build(name, changes)
    assert entry in str(error.value)
