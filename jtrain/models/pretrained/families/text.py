"""GPT-2, and BERT and models like it (MiniLM, other sentence encoders)."""

from collections.abc import Iterator
from typing import Any

from jtrain.models.pretrained.families.entries import COMMON, TANH_GELU, size_entries, sizes
from jtrain.models.pretrained.family import (
    Family,
    HFConfig,
    Leaf,
    Supported,
    Values,
    block_leaves,
    check_entries,
    layer_norm_leaves,
    linear_leaves,
)

GPT2_SIZES = {
    "vocab": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "epsilon": "layer_norm_epsilon",
}

GPT2_ENTRIES: Supported = {
    **COMMON,
    "activation_function": TANH_GELU,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "is_causal": (True, None),
}
# Other names of entries, which win in `transformers`.
GPT2_ALIASES = {"hidden_size": "width", "max_position_embeddings": "context"}
GPT2_ALIASES |= {"num_attention_heads": "heads", "num_hidden_layers": "layers"}


def _gpt2_values(hf: HFConfig) -> Values:
    found = sizes(hf, GPT2_SIZES)
    check_entries(hf, {alias: (found[ours],) for alias, ours in GPT2_ALIASES.items()})
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


def _gpt2_entries(model: Any) -> Values:
    return {
        **size_entries(model, GPT2_SIZES),
        "n_inner": model.size_of_hidden,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tied,
    }


def _gpt2_leaves(model: Any) -> Iterator[Leaf]:
    yield Leaf("tokens", ("transformer.wte.weight",))
    yield Leaf("positions", ("transformer.wpe.weight",))
    names = {
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "norm_attention": "ln_1",
        "norm_mlp": "ln_2",
    }
    yield from block_leaves(model, "transformer.h.{}", ("attn.c_attn",), names, columns=True)
    yield from layer_norm_leaves("norm", "transformer.ln_f")
    if not model.tied:
        yield Leaf("head", ("lm_head.weight",))


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    kind="transformer",
    entries=GPT2_ENTRIES,
    defaults={"tie_word_embeddings": True},
    values=_gpt2_values,
    hf=_gpt2_entries,
    leaves=_gpt2_leaves,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)


BERT_SIZES = {
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "epsilon": "layer_norm_eps",
}
EXACT = dict.fromkeys(("gelu", "gelu_python"), "gelu_exact")
ACTIVATIONS = EXACT | dict.fromkeys(TANH_GELU, "gelu")
BERT_ENTRIES: Supported = {
    **COMMON,
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
}


def _bert_values(hf: HFConfig) -> Values:
    activation = ACTIVATIONS[hf.get("hidden_act", "gelu")]
    pooler = hf.get("add_pooling_layer", hf.get("architectures") in (None, ["BertModel"]))
    return {**sizes(hf, BERT_SIZES), "activation": activation, "pooler": pooler}


def _bert_entries(model: Any) -> Values:
    return {
        **size_entries(model, BERT_SIZES),
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "position_embedding_type": "absolute",
        "add_pooling_layer": model.pooler,
    }


def _bert_leaves(model: Any) -> Iterator[Leaf]:
    for ours, theirs in {"tokens": "word", "positions": "position", "types": "token_type"}.items():
        yield Leaf(ours, (f"embeddings.{theirs}_embeddings.weight",))
    yield from layer_norm_leaves("norm", "embeddings.LayerNorm")
    names = {
        "out": "attention.output.dense",
        "norm_attention": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm_mlp": "output.LayerNorm",
    }
    qkv = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
    yield from block_leaves(model, "encoder.layer.{}", qkv, names)
    if model.pooler:
        yield from linear_leaves("pooler", "pooler.dense", model.width, model.width)


BERT = Family(
    name="bert",
    architecture="BertModel",
    kind="encoder",
    entries=BERT_ENTRIES,
    values=_bert_values,
    hf=_bert_entries,
    leaves=_bert_leaves,
    prefix="bert.",
    ignored=("embeddings.position_ids",),
    # The heads of pretraining, and the pooler where the model has none.
    surplus=lambda model: ("cls.",) if model.pooler else ("cls.", "pooler."),
    rename=lambda model, name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    ),
)
