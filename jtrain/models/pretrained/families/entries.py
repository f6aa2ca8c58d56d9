"""Entries of a config.json that several families share: sizes, rotary positions, windows."""

from collections.abc import Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.attention.rotary import LinearScaling, Llama3Scaling, Rotary
from jtrain.models.pretrained.family import MOST_LAYERS, HFConfig, Supported, Values

DECODER = {
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "epsilon": "rms_norm_eps",
}
"""Our fields by the entry of a decoder's config.json."""
COMMON: Supported = {
    **dict.fromkeys(("quantization_config", "pruned_heads"), (None, {})),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False, None)),
}
"""Entries that `transformers` reads for every model."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
ROPE: Supported = {
    **dict.fromkeys(("rope_type", "type"), ("default", "linear", "llama3")),
    "partial_rotary_factor": (1.0, None),
    # Angles for each kind of layer, which Gemma 3 alone has.
    **dict.fromkeys(("full_attention", "sliding_attention"), (None,)),
}
"""Entries of rotary positions."""
DECODER_ENTRIES: Supported = {
    **COMMON,
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
}
"""Entries of a decoder of Llama's layers."""


def get(hf: HFConfig, key: str, default: Any = ..., file: str = "config.json") -> Any:
    """Return an entry; raise CheckpointError if there is none and no default."""
    if (found := hf.get(key, default)) is ...:
        raise CheckpointError(
            f"{file} of the family {hf.get('model_type')} should have {key}, and has "
            f"{', '.join(sorted(hf)) or 'nothing'}. Download it again."
        )
    return found


def sizes(hf: HFConfig, names: Mapping[str, str]) -> Values:
    """Return our fields by the names of the entries."""
    if get(hf, names["layers"]) > MOST_LAYERS:  # its table would be built for ever
        raise CheckpointError(
            f"config.json has {names['layers']}={hf[names['layers']]}, and jtrain has models of at "
            f"most {MOST_LAYERS} layers. Download the folder again."
        )
    return {ours: get(hf, theirs) for ours, theirs in names.items()}


def size_entries(model: Any, names: Mapping[str, str]) -> Values:
    """Return the entries of our fields."""
    return {theirs: explicit(model, ours) for ours, theirs in names.items()}


def explicit(model: Any, name: str) -> Any:
    """Return a field of our config, of which 0 may mean a value that follows from others."""
    return getattr(model, EXPLICIT.get(name, name))


EXPLICIT = {"kv_heads": "groups", "head_size": "size_of_head", "hidden": "size_of_hidden"}
"""Fields of which 0 means a value that follows from others, and the properties that have it."""


def head_sizes(hf: HFConfig) -> Values:
    """Return the heads of keys and values, and the size of a head."""
    heads, width = get(hf, "num_attention_heads"), get(hf, "hidden_size")
    return {
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or width // heads,
    }


def rotary(hf: HFConfig) -> Values:
    """Return rotary positions, from `rope_scaling` or `rope_parameters`, and `rope_theta`."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = {f"{where}.{key}": value for key, value in (hf.get(where) or {}).items()}
    base = rope.get(f"{where}.rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get(f"{where}.rope_type", rope.get(f"{where}.type", "default"))
    scaling: Values = {"kind": "none" if kind == "default" else kind}
    rope["model_type"] = hf.get("model_type")
    if kind != "default":
        scaling["factor"] = float(get(rope, f"{where}.factor"))
    if kind == "llama3":
        scaling["low"] = float(get(rope, f"{where}.low_freq_factor"))
        scaling["high"] = float(get(rope, f"{where}.high_freq_factor"))
        key = "original_max_position_embeddings"  # beside the others, it wins in `transformers`
        scaling["context"] = hf[key] if key in hf else get(rope, f"{where}.{key}")
    return {"kind": "rotary", "base": float(base), "scaling": scaling}


def rotary_entries(positions: Rotary) -> Values:
    """Return the entries of rotary positions; `rope_scaling` is null without a scaling."""
    scaling = positions.scaling
    entries: Values = {"rope_theta": positions.base, "rope_scaling": None}
    if isinstance(scaling, LinearScaling):
        entries["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        entries["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.context,
        }
    return entries


def windows(hf: HFConfig, pattern: int) -> Values:
    """Return the window of a model in which every so many layers one sees all.

    `pattern` are layers to a layer that sees all, where the config names none.
    """
    layers, window = get(hf, "num_hidden_layers"), get(hf, "sliding_window", None)
    pattern = hf.get("sliding_window_pattern", 0 if hf.get("layer_types") else pattern)
    kinds = hf.get("layer_types") or layer_types(layers, pattern)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None or list(kinds) == ["full_attention"] * layers:
        return {"window": None, "global_every": 0}
    every = full[0] + 1 if full else pattern * (pattern > layers)
    if list(kinds) != layer_types(layers, every):
        raise CheckpointError(
            f"config.json has layer_types={kinds}, and jtrain has models in which every n-th layer "
            f"sees all positions and the others a window. Use a model with such layers."
        )
    return {"window": window, "global_every": every}


def layer_types(layers: int, every: int) -> list[str]:
    """Return the kind of each layer, where each layer number `every` sees all positions."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool(every == 0 or (i + 1) % every)] for i in range(layers)]
