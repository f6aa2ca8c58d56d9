"""Keys of a GGUF file that llama.cpp reads for our families, and what is computed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import ABOVE_1, get

ENTRIES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
}
REQUIRED = tuple(ENTRIES)[:6]
PER_LAYER = ("head_count", "head_count_kv", "feed_forward_length")  # a number, or one a layer
NEUTRAL = checks.Condition(
    "0 or none", lambda x: x in (0, "", "none") or (isinstance(x, list) and not any(x))
)
ANY = checks.Condition("any value", lambda x: True)
KEYS: checks.Supported = {
    **dict.fromkeys(REQUIRED, (checks.SIZE,)),
    "block_count": (checks.COUNT,),
    **dict.fromkeys(("attention.head_count_kv", "attention.key_length"), (checks.SIZE,)),
    "attention.layer_norm_rms_epsilon": (checks.NUMBER,),
    "attention.causal": (True,),
    "rope.freq_base": (ABOVE_1,),
    "rope.scaling.type": ("none", "linear", "yarn"),
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), (0, checks.NUMBER)),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "rope.scaling.yarn_attn_factor": (1, -1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    # Without an effect on logits, or found by the shapes of the tensors.
    **dict.fromkeys(
        (
            *("vocab_size", "pooling_type", "tensor_data_layout", "attention.value_length"),
            *("attention.layer_norm_epsilon", "expert_feed_forward_length"),
            *(f"rope.scaling.{name}" for name in ("finetuned", "original_context_length")),
            *(f"rope.scaling.yarn_beta_{name}" for name in ("fast", "slow")),
        ),
        (ANY,),
    ),
}
"""Values that are computed of the keys of an architecture that llama.cpp reads.

Any other key is of another function, unless its value is 0 or none.
"""
GEMMA_KEYS: checks.Supported = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (checks.NUMBER,)),
    "attention.sliding_window": (0, checks.SIZE),
    "attention.sliding_window_pattern": (checks.COUNT, checks.is_list_of(checks.FLAG)),
    "rope.freq_base_swa": (ABOVE_1,),
}
KEYS_OF: Mapping[str, checks.Supported] = {
    "llama": {"expert_count": (0, checks.COUNT), "expert_used_count": (0, checks.COUNT)},
    "gemma2": GEMMA_KEYS,
    "gemma3": GEMMA_KEYS,
}


def read_keys(path: Path, kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an architecture's keys.

    Raises:
        CheckpointError: if one is missing, or has a value that is not computed.
    """
    keys: dict[str, Any] = {"model_type": kind}
    for key, value in metadata.items():
        if key.startswith(f"{kind}."):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            one = isinstance(value, list) and len(set(value)) == 1 and key.endswith(PER_LAYER)
            keys[key.removeprefix(f"{kind}.")] = value[0] if one else value
    supported = {**KEYS, **KEYS_OF.get(kind, {})}
    rest = {name: (NEUTRAL,) for name in keys.keys() - supported.keys() - {"model_type"}}
    where = {"file": f"{path}", "where": f"{kind}."}
    for name in REQUIRED:
        get(keys, name, file=f"{path}")
    checks.check_entries(keys, supported, **where)
    heads, width = keys["attention.head_count"], keys["embedding_length"]
    head = keys.get("attention.key_length", width // heads)
    fewer = checks.Condition(f"at most {width}, the embedding_length", lambda x: head > 0)
    checks.check_entries(keys, {"attention.head_count": (fewer,)}, **where)
    window = keys.get("attention.sliding_window", 0)
    names = ("attention.key_length_swa", "attention.value_length_swa")
    scale = checks.Condition(f"{head}**-0.5", lambda x: _is_close(x, head**-0.5))
    same: checks.Supported = {
        **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa", *names), (head,)),
        "embedding_length_out": (width,),
        "attention.scale": (0, scale),
    }
    if type(window) is int and window >= keys["context_length"]:
        same = {**same, "attention.sliding_window": (ANY,)}
    if kind == "gemma2":
        same = {**same, "rope.freq_base_swa": (keys.get("rope.freq_base", 10000.0),)}
    checks.check_entries(keys, {**rest, **same}, **where)
    if keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) not in (0, 1):
        checks.check_entries(keys, {"rope.scaling.type": ("none", "linear")}, **where)
    return keys


def _is_close(value: Any, other: float) -> bool:
    return checks.NUMBER.holds(value) and math.isclose(value, other, rel_tol=1e-6)


def layer_windows(kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of Gemma's layers, and which of them have it."""
    window = keys.get("attention.sliding_window", 4096 if kind == "gemma2" else 0)
    found = keys.get("attention.sliding_window_pattern", 2 if kind == "gemma2" else 6)
    layers = range(keys["block_count"])
    windowed = found if isinstance(found, list) else [(i + 1) % found for i in layers]
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
    return {"sliding_window": window or None, "layer_types": kinds}
