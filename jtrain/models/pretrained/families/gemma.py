"""Gemma 2 and Gemma 3, for text."""

from typing import Any

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import (
    ABOVE_1,
    ROPE,
    TANH_GELU,
    get,
    layer_types,
    rotary,
    windows,
)
from jtrain.models.pretrained.families.llama import (
    decoder_entries,
    decoder_family,
    decoder_values,
)
from jtrain.models.pretrained.family import HFConfig, Values

ENTRIES: checks.Supported = {
    "hidden_act": (checks.TEXT,),  # of older files; `hidden_activation` wins
    "hidden_activation": TANH_GELU,
    "attention_bias": (False,),
    "query_pre_attn_scalar": (checks.NUMBER,),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (checks.NUMBER, None)),
    "sliding_window": (checks.SIZE, None),
    "sliding_window_pattern": (checks.COUNT,),
    "layer_types": (checks.is_list_of("full_attention", "sliding_attention"), None),
}
GEMMA3_ENTRIES: checks.Supported = {
    **ENTRIES,
    "rope_local_base_freq": (ABOVE_1,),
    "rope_parameters": {
        **dict.fromkeys(ROPE, (None,)),
        "full_attention": ROPE,
        # Angles of layers with a window are not scaled.
        "sliding_attention": {**ROPE, "rope_type": ("default",), "type": ("default",)},
    },
}
DEFAULTS = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _shared_values(hf: HFConfig) -> Values:
    if "hidden_activation" not in hf:
        checks.check_entries(hf, {"hidden_act": TANH_GELU})
    return {
        **decoder_values({**hf, "rope_parameters": None}),
        "activation": "geglu",
        "post_norm": True,
        "zero_centered": True,
        "embedding_scale": get(hf, "hidden_size") ** 0.5,
        "attention_scale": get(hf, "query_pre_attn_scalar") ** -0.5,
        "attention_cap": hf.get("attn_logit_softcapping"),
        "logit_cap": hf.get("final_logit_softcapping"),
    }


def _shared_entries(model: Any) -> Values:
    scale = model.attention_scale or model.size_of_head**-0.5
    scalar = scale**-2
    entries = {
        **decoder_entries(model),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": model.attention_cap,
        "final_logit_softcapping": model.logit_cap,
        "sliding_window": model.window or model.context,  # null fails, where no layer has a window
        "layer_types": layer_types(model.layers, model.global_every if model.window else 1),
    }
    del entries["hidden_act"]
    if model.window and model.global_every > model.layers:  # layer_types do not tell it
        entries["sliding_window_pattern"] = model.global_every
    return entries


def _gemma2_values(hf: HFConfig) -> Values:
    if not hf.get("layer_types"):
        checks.check_entries(hf, {"sliding_window_pattern": (2,)})
    return {**_shared_values(hf), **windows(hf, 2), "positions": rotary(hf)}


def _gemma3_values(hf: HFConfig) -> Values:
    rope = hf.get("rope_parameters") or {}
    scaled = {**(rope.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    windowed = rope.get("sliding_attention") or {}
    local = windowed.get("rope_theta", hf["rope_local_base_freq"])
    positions = rotary({**hf, "rope_scaling": scaled, "rope_parameters": None})
    return {
        **_shared_values({**hf, "rope_scaling": None}),
        **windows(hf, 6),
        "qk_norm": True,
        "positions": {**positions, "local_base": float(local)},
    }


def _gemma3_entries(model: Any) -> Values:
    local = getattr(model.positions, "local_base", None)
    return {
        **_shared_entries(model),
        "rope_local_base_freq": local or model.positions.base,
        "use_bidirectional_attention": False,
    }


GEMMA2 = decoder_family(
    "gemma2", "Gemma2ForCausalLM", entries=ENTRIES,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    values=_gemma2_values, hf=_shared_entries,
)  # fmt: skip
GEMMA3 = decoder_family(
    "gemma3_text", "Gemma3ForCausalLM", entries=GEMMA3_ENTRIES,
    defaults={**DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    values=_gemma3_values, hf=_gemma3_entries,
)  # fmt: skip
