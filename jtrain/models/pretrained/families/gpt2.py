"""GPT-2: learned positions, LayerNorm, biases; linear maps are stored as inputs x outputs."""

from collections.abc import Iterator
from typing import Any

from jtrain.models.pretrained.families.entries import COMMON, TANH_GELU, size_entries, sizes
from jtrain.models.pretrained.family import (
    SIZE,
    Family,
    HFConfig,
    Leaf,
    Supported,
    Values,
    by_group,
    chain,
    check_entries,
    from_columns,
    layer_norm_leaves,
    linear,
    thirds,
)

SIZES = {
    "vocab": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "epsilon": "layer_norm_epsilon",
}

ENTRIES: Supported = {
    **COMMON,
    **size_entries(SIZES),
    "n_inner": (SIZE, None),
    "activation_function": TANH_GELU,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "is_causal": (True, None),
}
# Other names of entries, which win in `transformers`.
ALIASES = {"hidden_size": "width", "max_position_embeddings": "context"}
ALIASES |= {"num_attention_heads": "heads", "num_hidden_layers": "layers"}


def _values(hf: HFConfig) -> Values:
    found = sizes(hf, SIZES)
    check_entries(hf, {alias: (found[ours],) for alias, ours in ALIASES.items()})
    return {
        **found,
        "kv_heads": found["heads"],
        "head_size": found["width"] // found["heads"],
        "hidden": hf.get("n_inner") or 4 * found["width"],
        "positions": {"kind": "learned"},
        "norm": "layer",
        "activation": "gelu",
        "bias": True,
        "tied": hf["tie_word_embeddings"],
    }


def _entries(model: Any) -> Values:
    return {
        **{theirs: getattr(model, ours) for ours, theirs in SIZES.items()},
        "n_inner": model.size_of_hidden,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tied,
    }


def _leaves(model: Any) -> Iterator[Leaf]:
    width, hidden = model.width, model.size_of_hidden
    grouped = by_group(model.heads, model.groups)
    kernel = chain(thirds(1), grouped).then(linear(width, 3 * width))
    yield Leaf("tokens", ("transformer.wte.weight",))
    yield Leaf("positions", ("transformer.wpe.weight",))
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", f"transformer.h.{i}"
        yield Leaf(f"{ours}/qkv/kernel", (f"{theirs}.attn.c_attn.weight",), kernel)
        yield Leaf(f"{ours}/qkv/bias", (f"{theirs}.attn.c_attn.bias",), chain(thirds(0), grouped))
        for our, their, inputs, outputs in (
            ("out", "attn.c_proj", width, width),
            ("up", "mlp.c_fc", width, hidden),
            ("down", "mlp.c_proj", hidden, width),
        ):
            name = f"{theirs}.{their}"
            yield Leaf(f"{ours}/{our}/kernel", (f"{name}.weight",), from_columns(inputs, outputs))
            yield Leaf(f"{ours}/{our}/bias", (f"{name}.bias",))
        yield from layer_norm_leaves(f"{ours}/norm_attention", f"{theirs}.ln_1")
        yield from layer_norm_leaves(f"{ours}/norm_mlp", f"{theirs}.ln_2")
    yield from layer_norm_leaves("norm", "transformer.ln_f")
    if not model.tied:
        yield Leaf("head", ("lm_head.weight",))


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    kind="transformer",
    entries=ENTRIES,
    defaults={"tie_word_embeddings": True},
    values=_values,
    hf=_entries,
    leaves=_leaves,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
