"""Llama, and families with its layers: SmolLM2, Mistral, Mixtral, Qwen2 and Qwen3."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import (
    DECODER,
    DECODER_ENTRIES,
    get,
    head_sizes,
    rotary,
    rotary_entries,
    sizes,
)
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values
from jtrain.models.pretrained.transforms import TRANSPOSE, by_group, linear, stack

MLP: TypeAlias = Callable[[Any, str, str], Iterator[Leaf]]

_BUFFERS = (".rotary_emb.inv_freq",)


def decoder_values(hf: HFConfig) -> Values:
    """Return the fields of a decoder with rotary positions, RMSNorm and gated MLPs."""
    return {
        **sizes(hf, DECODER),
        **head_sizes(hf),
        "positions": rotary(hf),
        "norm": "rms",
        "activation": "swiglu",
        "bias": False,
        "tied": hf.get("tie_word_embeddings", False),
    }


def decoder_entries(model: Any) -> Values:
    """Return the entries of `decoder_values`."""
    fields = {ours: getattr(model, ours) for ours in DECODER} | {"hidden": model.size_of_hidden}
    return {
        **{theirs: fields[ours] for ours, theirs in DECODER.items()},
        "num_key_value_heads": model.groups,
        "head_dim": model.size_of_head,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        **rotary_entries(model.positions),
    }


def decoder_leaves(model: Any, mlp: MLP | None = None) -> Iterator[Leaf]:
    """Yield the table of a decoder of Llama's layers."""
    inner, width = model.heads * model.size_of_head, model.width
    columns = (model.heads + 2 * model.groups) * model.size_of_head
    grouped = by_group(model.heads, model.groups)
    biased = model.bias or model.qkv_bias
    yield Leaf("tokens", ("model.embed_tokens.weight",))
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", f"model.layers.{i}"
        names = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        kernels = tuple(f"{name}.weight" for name in names)
        yield Leaf(f"{ours}/qkv/kernel", kernels, grouped.then(linear(width, columns)))
        if biased:
            yield Leaf(f"{ours}/qkv/bias", tuple(f"{name}.bias" for name in names), grouped)
        if model.qk_norm:
            for name in "qk":
                yield Leaf(f"{ours}/norm_{name}/scale", (f"{theirs}.self_attn.{name}_norm.weight",))
        yield from linear_leaves(
            f"{ours}/out", f"{theirs}.self_attn.o_proj", inner, width, model.bias
        )
        yield from (mlp or mlp_leaves)(model, ours, theirs)
        for our, their in block_norms(model).items():
            yield Leaf(f"{ours}/{our}/scale", (f"{theirs}.{their}.weight",))
    yield Leaf("norm/scale", ("model.norm.weight",))
    if not model.tied:
        yield Leaf("head", ("lm_head.weight",))


def block_norms(model: Any) -> dict[str, str]:
    """Return the norms of a block; with norms of the outputs, the names are Gemma's."""
    if not model.post_norm:
        return {"norm_attention": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    return {
        "norm_attention": "input_layernorm",
        "norm_attention_out": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "norm_mlp_out": "post_feedforward_layernorm",
    }


def mlp_leaves(model: Any, ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the table of a gated MLP."""
    width, hidden = model.width, model.size_of_hidden
    for name, a, b in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        yield from linear_leaves(f"{ours}/{name}", f"{theirs}.mlp.{name}_proj", a, b, model.bias)


def linear_leaves(
    ours: str, theirs: str, inputs: int, outputs: int, bias: bool = True
) -> Iterator[Leaf]:
    """Yield the kernel of a linear map, and its bias."""
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), linear(inputs, outputs))
    if bias:
        yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))


def _expert_leaves(model: Any, ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the table of experts: w1 is gate, w3 up, w2 down."""
    mixture, moe = f"{ours}/mixture", f"{theirs}.block_sparse_moe"
    yield Leaf(f"{mixture}/router", (f"{moe}.gate.weight",), TRANSPOSE)
    for our, their in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        names = tuple(f"{moe}.experts.{i}.{their}.weight" for i in range(model.experts.count))
        yield Leaf(f"{mixture}/{our}", names, stack(TRANSPOSE))


def _llama_values(hf: HFConfig) -> Values:
    bias = hf.get("attention_bias", False)
    same = checks.Condition(f"that of attention_bias, {bias}", lambda x: x == bias)
    checks.check_entries({"mlp_bias": False, **hf}, {"mlp_bias": (same,)})
    return {**decoder_values(hf), "bias": bias}


def _llama_entries(model: Any) -> Values:
    bias = model.bias
    return {**decoder_entries(model), "attention_bias": bias, "mlp_bias": bias}


def _mistral_values(hf: HFConfig) -> Values:
    window = hf["sliding_window"]
    kind = "sliding_attention" if window else "full_attention"
    checks.check_entries(hf, {"layer_types": (checks.is_list_of(kind), None)})
    return {**decoder_values(hf), "window": window}


def _mistral_entries(model: Any) -> Values:
    return {**decoder_entries(model), "sliding_window": model.window}


def _mixtral_values(hf: HFConfig) -> Values:
    experts = {
        "kind": "dropless",
        "count": get(hf, "num_local_experts"),
        "top_k": get(hf, "num_experts_per_tok"),
        "weights": "chosen",
    }
    checks.check_entries(hf, {"num_experts": (experts["count"],)})  # another name of the entry
    return {**_mistral_values(hf), "experts": experts}


def _mixtral_entries(model: Any) -> Values:
    count, chosen = getattr(model.experts, "count", 0), getattr(model.experts, "top_k", 0)
    experts = {"num_local_experts": count, "num_experts_per_tok": chosen}
    return {**_mistral_entries(model), **experts}


def _qwen2_values(hf: HFConfig) -> Values:
    # A window that no layer has does not matter.
    full = hf.get("layer_types") or hf["max_window_layers"] >= get(hf, "num_hidden_layers")
    if not full and hf["sliding_window"]:
        checks.check_entries(hf, {"use_sliding_window": (False,)})
    return {**decoder_values(hf), "qkv_bias": True}


def _qwen3_values(hf: HFConfig) -> Values:
    return {**_qwen2_values(hf), "qkv_bias": False, "qk_norm": True}


def decoder_family(
    name: str,
    architecture: str,
    *,
    entries: checks.Supported,
    defaults: HFConfig,
    values: Callable[[HFConfig], Values],
    hf: Callable[[Any], Values],
    leaves: Callable[[Any], Iterator[Leaf]] = decoder_leaves,
) -> Family:
    """Return a family of decoders whose tensors are named as Llama's; arguments as of `Family`.

    `entries` are those beside, or in place of, `DECODER_ENTRIES`.
    """
    return Family(
        name=name,
        architecture=architecture,
        kind="transformer",
        entries={**DECODER_ENTRIES, **entries},
        defaults=defaults,
        values=values,
        hf=hf,
        leaves=leaves,
        prefix="model.",
        ignored=_BUFFERS,
    )


_WINDOW: checks.Supported = {
    "sliding_window": (checks.SIZE, None),
    "layer_types": (checks.is_list_of(checks.TEXT), None),
}
_EXPERTS = {key: (checks.COUNT,) for key in ("num_local_experts", "num_experts_per_tok")}
_BIASES = {key: (checks.FLAG,) for key in ("attention_bias", "mlp_bias")}
_QWEN: checks.Supported = {
    "use_sliding_window": (checks.FLAG,),
    "sliding_window": (checks.SIZE, None),
    "max_window_layers": (checks.COUNT, 0),
}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
LLAMA = decoder_family(
    "llama", "LlamaForCausalLM", entries={**_BIASES, "pretraining_tp": (1, None)}, defaults={},
    values=_llama_values, hf=_llama_entries,
)  # fmt: skip
MISTRAL = decoder_family(
    "mistral", "MistralForCausalLM", entries=_WINDOW,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096}, values=_mistral_values,
    hf=_mistral_entries,
)  # fmt: skip
MIXTRAL = decoder_family(
    "mixtral", "MixtralForCausalLM", entries={**_WINDOW, **_EXPERTS},
    defaults={"num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6},
    values=_mixtral_values, hf=_mixtral_entries,
    leaves=lambda model: decoder_leaves(model, _expert_leaves),
)  # fmt: skip
QWEN2 = decoder_family(
    "qwen2", "Qwen2ForCausalLM", entries=_QWEN, defaults=_QWEN_DEFAULTS, values=_qwen2_values,
    hf=lambda model: {**decoder_entries(model), "use_sliding_window": False},
)  # fmt: skip
QWEN3 = decoder_family(
    "qwen3", "Qwen3ForCausalLM", entries={**_QWEN, "attention_bias": (False,)},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128}, values=_qwen3_values,
    hf=lambda model: {**QWEN2.hf(model), "attention_bias": False},
)  # fmt: skip
