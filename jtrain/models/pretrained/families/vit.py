"""Vision transformers: ViT of `transformers`, and of timm."""

from collections.abc import Iterator
from typing import Any

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import get, size_entries, sizes
from jtrain.models.pretrained.families.images import (
    IMAGE_ENTRIES,
    label_count,
    label_entries,
    patches,
    sides,
    square,
)
from jtrain.models.pretrained.families.llama import linear_leaves
from jtrain.models.pretrained.families.timm import TIMM_ENTRIES, timm_classes, timm_entries
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values, layer_norm_leaves
from jtrain.models.pretrained.transforms import by_group, chain, linear, reshape, thirds

SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "patch": "patch_size",
    "epsilon": "layer_norm_eps",
}
ENTRIES: checks.Supported = {
    **IMAGE_ENTRIES,
    **size_entries(SIZES),
    "image_size": (checks.SIZE, checks.is_list_of(checks.SIZE, length=2)),
    "hidden_act": ("gelu", "gelu_python"),
    "qkv_bias": (True,),
}
# Width and heads by the name in timm; Dosovitskiy et al. 2021 and Touvron et al. 2021.
TIMM_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
TIMM = {
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


def _values(hf: HFConfig) -> Values:
    height, width = sides(get(hf, "image_size"))
    found = sizes(hf, SIZES)
    checks.check_entries(hf, {"head_dim": (found["width"] // found["heads"], None)})
    return {
        **found,
        "image": (height, width, hf.get("num_channels", 3)),
        "pool": "class",
        "classes": label_count(hf),
    }


def _entries(model: Any) -> Values:
    fields = {ours: getattr(model, ours) for ours in SIZES} | {"hidden": model.size_of_hidden}
    return {
        **{theirs: fields[ours] for ours, theirs in SIZES.items()},
        "image_size": square(model.shape),
        "num_channels": model.shape[2],
        "hidden_act": "gelu",
        "qkv_bias": True,
        **label_entries(model.classes),
    }


def _leaves(model: Any) -> Iterator[Leaf]:
    yield from _embedding_leaves(
        model,
        convolution="vit.embeddings.patch_embeddings.projection",
        token="vit.embeddings.cls_token",
        positions="vit.embeddings.position_embeddings",
    )
    width, hidden = model.width, model.size_of_hidden
    grouped = by_group(model.heads, model.heads)
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", f"vit.encoder.layer.{i}"
        names = tuple(f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value"))
        kernels, biases = (tuple(f"{n}.{end}" for n in names) for end in ("weight", "bias"))
        yield Leaf(f"{ours}/qkv/kernel", kernels, grouped.then(linear(width, 3 * width)))
        yield Leaf(f"{ours}/qkv/bias", biases, grouped)
        yield from linear_leaves(f"{ours}/out", f"{theirs}.attention.output.dense", width, width)
        yield from layer_norm_leaves(f"{ours}/norm_attention", f"{theirs}.layernorm_before")
        yield from linear_leaves(f"{ours}/up", f"{theirs}.intermediate.dense", width, hidden)
        yield from linear_leaves(f"{ours}/down", f"{theirs}.output.dense", hidden, width)
        yield from layer_norm_leaves(f"{ours}/norm_mlp", f"{theirs}.layernorm_after")
    yield from layer_norm_leaves("norm", "vit.layernorm")
    yield from linear_leaves("head", "classifier", width, model.classes)


def _timm_values(hf: HFConfig) -> Values:
    return {**TIMM[hf["architecture"]], "classes": timm_classes(hf)}


def _timm_leaves(model: Any) -> Iterator[Leaf]:
    yield from _embedding_leaves(
        model, convolution="patch_embed.proj", token="cls_token", positions="pos_embed"
    )
    width, hidden = model.width, model.size_of_hidden
    grouped = by_group(model.heads, model.heads)
    both = chain(thirds(0), grouped)
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", f"blocks.{i}"
        qkv = f"{theirs}.attn.qkv"
        yield Leaf(f"{ours}/qkv/kernel", (f"{qkv}.weight",), both.then(linear(width, 3 * width)))
        yield Leaf(f"{ours}/qkv/bias", (f"{qkv}.bias",), both)
        yield from linear_leaves(f"{ours}/out", f"{theirs}.attn.proj", width, width)
        yield from layer_norm_leaves(f"{ours}/norm_attention", f"{theirs}.norm1")
        yield from linear_leaves(f"{ours}/up", f"{theirs}.mlp.fc1", width, hidden)
        yield from linear_leaves(f"{ours}/down", f"{theirs}.mlp.fc2", hidden, width)
        yield from layer_norm_leaves(f"{ours}/norm_mlp", f"{theirs}.norm2")
    yield from layer_norm_leaves("norm", "norm")
    yield from linear_leaves("head", "head", width, model.classes)


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
    entries=ENTRIES,
    values=_values,
    hf=_entries,
    leaves=_leaves,
    prefix="vit.",
    surplus=lambda model: ("pooler.",),
)
TIMM_VIT = Family(
    name="timm_vit",
    architecture="",
    kind="vit",
    timm=frozenset(TIMM),
    entries={**TIMM_ENTRIES, "global_pool": ("token", "", None)},
    values=_timm_values,
    hf=lambda model: timm_entries(TIMM, model, head="head", first="patch_embed.proj"),
    leaves=_timm_leaves,
)
