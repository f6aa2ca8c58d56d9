"""Encoders: BERT and its kin (MiniLM, other sentence encoders), ViT of `transformers` and timm."""

from collections.abc import Iterator
from typing import Any

from jtrain.models.pretrained.families.entries import COMMON, TANH_GELU, get, size_entries, sizes
from jtrain.models.pretrained.families.images import (
    IMAGE_ENTRIES,
    TIMM_ENTRIES,
    label_count,
    label_entries,
    patches,
    sides,
    square,
    timm_classes,
    timm_entries,
)
from jtrain.models.pretrained.family import (
    FLAG,
    SIZE,
    Family,
    HFConfig,
    Leaf,
    Supported,
    Values,
    check_entries,
    encoder_block_leaves,
    is_list_of,
    layer_norm_leaves,
    linear_leaves,
    reshape,
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
    **size_entries(BERT_SIZES),
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_pooling_layer": (FLAG,),
}


def _bert_values(hf: HFConfig) -> Values:
    activation = ACTIVATIONS[hf.get("hidden_act", "gelu")]
    pooler = hf.get("add_pooling_layer", hf.get("architectures") in (None, ["BertModel"]))
    return {**sizes(hf, BERT_SIZES), "activation": activation, "pooler": pooler}


def _bert_entries(model: Any) -> Values:
    fields = {ours: getattr(model, ours) for ours in BERT_SIZES} | {"hidden": model.size_of_hidden}
    return {
        **{theirs: fields[ours] for ours, theirs in BERT_SIZES.items()},
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
    yield from encoder_block_leaves(model, "encoder.layer.{}", qkv, names)
    if model.pooler:
        yield from linear_leaves("pooler", "pooler.dense", model.width, model.width)


def _bert_surplus(model: Any) -> tuple[str, ...]:
    """Return the heads of pretraining, and the pooler where the model has none."""
    return ("cls.",) if model.pooler else ("cls.", "pooler.")


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
    surplus=_bert_surplus,
    rename=lambda model, name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    ),
)


VIT_SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "patch": "patch_size",
    "epsilon": "layer_norm_eps",
}
VIT_ENTRIES: Supported = {
    **IMAGE_ENTRIES,
    **size_entries(VIT_SIZES),
    "image_size": (SIZE, is_list_of(SIZE, length=2)),
    "hidden_act": ("gelu", "gelu_python"),
    "qkv_bias": (True,),
}
# Width and heads by the name in timm; Dosovitskiy et al. 2021 and Touvron et al. 2021.
TIMM_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
TIMM_VITS = {
    f"vit_{size}_patch{patch}_{side}": {
        "image": (side, side, 3),
        "patch": patch,
        "layers": 24 if size == "large" else 12,
        "heads": heads,
        "width": width,
        "hidden": 4 * width,
        "epsilon": 1e-6,
        "pool": "class",
    }
    for size, (width, heads) in TIMM_SIZES.items()
    for patch in (8, 14, 16, 32)
    for side in (224, 384)
}


def _vit_values(hf: HFConfig) -> Values:
    height, width = sides(get(hf, "image_size"))
    found = sizes(hf, VIT_SIZES)
    check_entries(hf, {"head_dim": (found["width"] // found["heads"], None)})
    return {
        **found,
        "image": (height, width, hf.get("num_channels", 3)),
        "pool": "class",
        "classes": label_count(hf),
    }


def _vit_entries(model: Any) -> Values:
    fields = {ours: getattr(model, ours) for ours in VIT_SIZES} | {"hidden": model.size_of_hidden}
    return {
        **{theirs: fields[ours] for ours, theirs in VIT_SIZES.items()},
        "image_size": square(model.shape),
        "num_channels": model.shape[2],
        "hidden_act": "gelu",
        "qkv_bias": True,
        **label_entries(model.classes),
    }


def _vit_leaves(model: Any) -> Iterator[Leaf]:
    yield from _embedding_leaves(
        model,
        convolution="vit.embeddings.patch_embeddings.projection",
        token="vit.embeddings.cls_token",
        positions="vit.embeddings.position_embeddings",
    )
    names = {
        "out": "attention.output.dense",
        "norm_attention": "layernorm_before",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm_mlp": "layernorm_after",
    }
    qkv = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))
    yield from encoder_block_leaves(model, "vit.encoder.layer.{}", qkv, names)
    yield from layer_norm_leaves("norm", "vit.layernorm")
    yield from linear_leaves("head", "classifier", model.width, model.classes)


def _timm_values(hf: HFConfig) -> Values:
    return {**TIMM_VITS[hf["architecture"]], "classes": timm_classes(hf)}


def _timm_leaves(model: Any) -> Iterator[Leaf]:
    yield from _embedding_leaves(
        model, convolution="patch_embed.proj", token="cls_token", positions="pos_embed"
    )
    names = {
        "out": "attn.proj",
        "norm_attention": "norm1",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "norm_mlp": "norm2",
    }
    yield from encoder_block_leaves(model, "blocks.{}", ("attn.qkv",), names)
    yield from layer_norm_leaves("norm", "norm")
    yield from linear_leaves("head", "head", model.width, model.classes)


def _embedding_leaves(
    model: Any, *, convolution: str, token: str, positions: str
) -> Iterator[Leaf]:
    width = model.width
    kernel = patches(model.patch, model.shape[2], width)
    yield Leaf("patches/kernel", (f"{convolution}.weight",), kernel)
    yield Leaf("patches/bias", (f"{convolution}.bias",))
    yield Leaf("token", (token,), reshape((1, 1, width), (width,)))
    count = model.positions
    yield Leaf("positions", (positions,), reshape((1, count, width), (count, width)))


VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    kind="vit",
    entries=VIT_ENTRIES,
    values=_vit_values,
    hf=_vit_entries,
    leaves=_vit_leaves,
    prefix="vit.",
    surplus=lambda model: ("pooler.",),
)
TIMM_VIT = Family(
    name="timm_vit",
    architecture="",
    kind="vit",
    timm=frozenset(TIMM_VITS),
    entries={**TIMM_ENTRIES, "global_pool": ("token", "", None)},
    values=_timm_values,
    hf=lambda model: timm_entries(TIMM_VITS, model, head="head", first="patch_embed.proj"),
    leaves=_timm_leaves,
)
