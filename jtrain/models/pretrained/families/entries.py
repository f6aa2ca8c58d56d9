"""Entries of a config.json that several families share: sizes, rotary positions, windows."""

from collections.abc import Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.attention.positions import LinearScaling, Llama3Scaling, Rotary
from jtrain.models.pretrained.family import HFConfig, Values

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


def get(hf: HFConfig, key: str, default: Any = ...) -> Any:
    """Return an entry.

    Raises:
        CheckpointError: if the config has none, and it has no default.
    """
    if (found := hf.get(key, default)) is ...:
        raise CheckpointError(
            f"config.json of the family {hf.get('model_type')} should have {key}, and has "
            f"{', '.join(sorted(hf)) or 'nothing'}. Download the folder again."
        )
    return found


def sizes(hf: HFConfig, names: Mapping[str, str]) -> Values:
    """Return our fields by the names of the entries."""
    return {ours: get(hf, theirs) for ours, theirs in names.items()}


def check_entries(hf: HFConfig, **supported: tuple[Any, ...]) -> None:
    """Raise CheckpointError if an entry has a value that the model does not compute.

    Args:
        hf: the config.json.
        supported: the values of an entry that are; the first is the default.
    """
    for key, values in supported.items():
        if (found := hf.get(key, values[0])) not in values:
            raise CheckpointError(
                f"config.json has {key}={found!r}, and for the family {hf.get('model_type')} "
                f"jtrain computes only {' or '.join(map(repr, values))}. Use a model with one of "
                f"these; weights read into another function give wrong outputs."
            )


def head_sizes(hf: HFConfig) -> Values:
    """Return the heads of keys and values, and the size of a head."""
    heads, width = get(hf, "num_attention_heads"), get(hf, "hidden_size")
    return {
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or width // heads,
    }


def rotary(hf: HFConfig, base: float = 10000.0) -> Values:
    """Return rotary positions, from `rope_parameters` or `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: if the angles are scaled in another way.
    """
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    check_entries(
        {"partial_rotary_factor": 1.0, **hf, **rope, "model_type": hf.get("model_type")},
        partial_rotary_factor=(1.0,),
    )
    theta = rope.get("rope_theta", hf.get("rope_theta", base))
    return {"kind": "rotary", "base": float(theta), "scaling": _scaling(hf, rope)}


def _scaling(hf: HFConfig, rope: Mapping[str, Any]) -> Values:
    kind = rope.get("rope_type", rope.get("type", "default"))
    check_entries({"model_type": hf.get("model_type"), "rope_type": kind},
                  rope_type=("default", "linear", "llama3"))  # fmt: skip
    if kind == "linear":
        return {"kind": "linear", "factor": float(rope["factor"])}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": float(rope["factor"]),
            "low": float(rope["low_freq_factor"]),
            "high": float(rope["high_freq_factor"]),
            "context": rope["original_max_position_embeddings"],
        }
    return {"kind": "none"}


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

    Args:
        hf: the config.json.
        pattern: layers to a layer that sees all, where the config names none.

    Raises:
        CheckpointError: if the layers with a window have another pattern.
    """
    layers, window = get(hf, "num_hidden_layers"), get(hf, "sliding_window", None)
    pattern = hf.get("sliding_window_pattern", 0 if hf.get("layer_types") else pattern)
    kinds = hf.get("layer_types") or layer_types(layers, pattern)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None or len(full) == layers:
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
