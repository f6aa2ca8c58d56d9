"""Decoders of Llama's layers: Llama, SmolLM2, Mistral, Mixtral, Qwen2, Qwen3, and Gemma 2 and 3."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from jtrain.models.pretrained.families.entries import (
    DECODER,
    DECODER_ENTRIES,
    ROPE,
    TANH_GELU,
    get,
    head_sizes,
    layer_types,
    rotary,
    rotary_entries,
    size_entries,
    sizes,
    windows,
)
from jtrain.models.pretrained.family import (
    STACK,
    TRANSPOSE,
    Family,
    HFConfig,
    Leaf,
    Supported,
    Values,
    by_group,
    check_entries,
    linear,
    linear_leaves,
)

MLP: TypeAlias = Callable[[Any, str, str], Iterator[Leaf]]


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
    return {
        **size_entries(model, DECODER),
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
        out = f"{theirs}.self_attn.o_proj"
        yield from linear_leaves(f"{ours}/out", out, inner, width, bias=model.bias)
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
        layer = f"{theirs}.mlp.{name}_proj"
        yield from linear_leaves(f"{ours}/{name}", layer, a, b, bias=model.bias)


def _expert_leaves(model: Any, ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the table of experts: w1 is gate, w3 up, w2 down."""
    mixture, moe = f"{ours}/mixture", f"{theirs}.block_sparse_moe"
    yield Leaf(f"{mixture}/router", (f"{moe}.gate.weight",), TRANSPOSE)
    for our, their in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        names = tuple(f"{moe}.experts.{i}.{their}.weight" for i in range(model.experts.count))
        yield Leaf(f"{mixture}/{our}", names, TRANSPOSE.then(STACK))


def _llama_values(hf: HFConfig) -> Values:
    bias = hf.get("attention_bias", False)
    check_entries({"mlp_bias": False, **hf}, {"mlp_bias": (bias,)})  # that of attention_bias
    _check_layers(hf, "full_attention")
    return {**decoder_values(hf), "bias": bias}


def _check_layers(hf: HFConfig, kind: str) -> None:
    """Raise CheckpointError unless all layers are of one kind."""
    if set(hf.get("layer_types") or (kind,)) != {kind}:
        check_entries(hf, {"layer_types": (f"{kind} in every layer", None)})


def _llama_entries(model: Any) -> Values:
    bias = model.bias
    return {**decoder_entries(model), "attention_bias": bias, "mlp_bias": bias}


def _mistral_values(hf: HFConfig) -> Values:
    window = hf["sliding_window"]
    _check_layers(hf, "sliding_attention" if window else "full_attention")
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
    check_entries(hf, {"num_experts": (experts["count"],)})  # another name of the entry
    return {**_mistral_values(hf), "experts": experts}


def _mixtral_entries(model: Any) -> Values:
    count, chosen = getattr(model.experts, "count", 0), getattr(model.experts, "top_k", 0)
    experts = {"num_local_experts": count, "num_experts_per_tok": chosen}
    return {**_mistral_entries(model), **experts}


def _qwen2_values(hf: HFConfig) -> Values:
    # A window that no layer has does not matter.
    full = hf.get("layer_types") or hf["max_window_layers"] >= get(hf, "num_hidden_layers")
    if not full and hf["sliding_window"]:
        check_entries(hf, {"use_sliding_window": (False,)})
    _check_layers(hf, "full_attention")
    return {**decoder_values(hf), "qkv_bias": True}


def _family(
    name: str, architecture: str, *, entries: Supported | None = None, **others: Any
) -> Family:
    """Return a family whose tensors are named as Llama's; `entries` go over `DECODER_ENTRIES`."""
    shared: dict[str, Any] = {"leaves": decoder_leaves, **others}
    return Family(
        name=name, architecture=architecture, kind="transformer", prefix="model.",
        entries={**DECODER_ENTRIES, **(entries or {})}, ignored=(".rotary_emb.inv_freq",),
        **shared,
    )  # fmt: skip


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
LLAMA = _family(
    "llama", "LlamaForCausalLM", entries={"pretraining_tp": (1, None)},
    values=_llama_values, hf=_llama_entries,
)  # fmt: skip
MISTRAL = _family(
    "mistral", "MistralForCausalLM", values=_mistral_values, hf=_mistral_entries,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)  # fmt: skip
MIXTRAL = _family(
    "mixtral", "MixtralForCausalLM", values=_mixtral_values, hf=_mixtral_entries,
    defaults={"num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6},
    leaves=lambda model: decoder_leaves(model, _expert_leaves),
)  # fmt: skip
QWEN2 = _family(
    "qwen2", "Qwen2ForCausalLM", defaults=_QWEN_DEFAULTS, values=_qwen2_values,
    hf=lambda model: {**decoder_entries(model), "use_sliding_window": False},
)  # fmt: skip
QWEN3 = _family(
    "qwen3", "Qwen3ForCausalLM", entries={"attention_bias": (False,)},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    values=lambda hf: {**_qwen2_values(hf), "qkv_bias": False, "qk_norm": True},
    hf=lambda model: {**QWEN2.hf(model), "attention_bias": False},
)  # fmt: skip


_GEMMA: Supported = {
    "hidden_act": ("gelu", *TANH_GELU),  # of older files; `hidden_activation` wins
    "hidden_activation": TANH_GELU,
    "attention_bias": (False,),
}
_GEMMA3: Supported = {
    **_GEMMA,
    "rope_parameters": {
        **dict.fromkeys(ROPE, (None,)),
        "full_attention": ROPE,
        # Angles of layers with a window are not scaled.
        "sliding_attention": {**ROPE, "rope_type": ("default",), "type": ("default",)},
    },
}
_GEMMA_DEFAULTS = {
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
        check_entries(hf, {"hidden_act": TANH_GELU})
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
        check_entries(hf, {"sliding_window_pattern": (2,)})
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


GEMMA2 = _family(
    "gemma2", "Gemma2ForCausalLM", entries=_GEMMA,
    defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    values=_gemma2_values, hf=_shared_entries,
)  # fmt: skip
GEMMA3 = _family(
    "gemma3_text", "Gemma3ForCausalLM", entries=_GEMMA3,
    defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    values=_gemma3_values, hf=_gemma3_entries,
)  # fmt: skip
