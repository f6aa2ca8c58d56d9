"""What families of image classifiers share, folders as timm lays them out, and ViT."""

from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families.entries import COMMON, explicit, get, size_entries, sizes
from jtrain.models.pretrained.family import (
    Family,
    HFConfig,
    Leaf,
    Supported,
    Transform,
    Values,
    block_leaves,
    check_entries,
    each,
    layer_norm_leaves,
    linear,
    linear_leaves,
    reshape,
)

CONVOLUTION = each(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""Between o i k k and k k i o."""
COUNTERS = ("num_batches_tracked",)  # of the norms: a fixed momentum does not read them


def label_count(hf: HFConfig) -> int:
    """Return the number of classes of a config.json of transformers, whose default is 2."""
    return hf.get("num_labels") or len(hf.get("id2label") or {}) or 2


def label_entries(classes: int) -> Values:
    """Return the names LABEL_i; an export replaces them by those of the source, if it has any."""
    names = {str(i): f"LABEL_{i}" for i in range(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def convolution_leaves(ours: str, our_norm: str, theirs: str, their_norm: str) -> Iterator[Leaf]:
    """Yield a convolution without a bias, and its batch norm, whose statistics are `extra`."""
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), CONVOLUTION)
    yield from layer_norm_leaves(our_norm, their_norm)
    for name in ("mean", "var"):
        yield Leaf(f"extra/{our_norm}/{name}", (f"{their_norm}.running_{name}",))


def patches(patch: int, channels: int, width: int) -> Transform:
    """Return the transform of a convolution o i k k to a linear map of patches, k k i."""
    inputs = patch * patch * channels
    flat = each(
        lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], -1),
        lambda x: x.reshape(-1, patch, patch, channels).transpose(0, 3, 1, 2),
    )
    return flat.then(linear(inputs, width))


TIMM_ENTRIES: Supported = {"model_args": (None, {})}
"""Entries of a config.json of timm."""


def timm_classes(hf: HFConfig) -> int:
    """Return the number of classes of a config.json of timm, whose default is ImageNet's."""
    cfg = hf.get("pretrained_cfg") or {}
    return hf.get("num_classes") or cfg.get("num_classes") or 1000


def timm_values(hf: HFConfig, values: Values) -> Values:
    """Return the values of an architecture, with the classes of a config.json and its images."""
    size = (hf.get("pretrained_cfg") or {}).get("input_size")  # channels, height, width
    image = (size[1], size[2], size[0]) if size else values["image"]
    return {**values, "image": image, "classes": timm_classes(hf)}


def timm_entries(
    architectures: Mapping[str, Values], model: Any, *, head: str, first: str
) -> Values:
    """Return config.json for our config; raise CheckpointError if no architecture has its sizes.

    Args:
        architectures: fields of our config by the name of an architecture.
        head, first: the names of the last and of the first layer.
    """
    height, width, channels = model.shape
    pixels = model.pixels
    for name, values in architectures.items():
        fields = {key: value for key, value in values.items() if key != "image"}
        ours = {key: explicit(model, key) for key in fields}
        shape = values.get("image", (height, width, channels))
        if ours == fields and shape == (height, width, channels):
            about: Values = {
                "architecture": name,
                "input_size": [channels, height, width],
                "num_classes": model.classes,
                "first_conv": first,
                "classifier": head,
                "interpolation": "bilinear",  # in one step to the size, without a crop
                "crop_mode": "squash",
                "crop_pct": 1.0,
                # A reader takes a mean of its own where there is none.
                "mean": list(pixels.mean or (0.0,) * channels),
                "std": list(pixels.std or (1.0,) * channels),
            }
            return {"architecture": name, "num_classes": model.classes, "pretrained_cfg": about}
    raise CheckpointError(
        f"timm has no {model.kind} of these sizes, only {', '.join(architectures)}. Export the "
        f"tensors under jtrain's names: --to safetensors"
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
    **COMMON,
    "hidden_act": ("gelu", "gelu_python"),
    "qkv_bias": (True,),
}
# Width and heads by the name in timm; Dosovitskiy et al. 2021 and Touvron et al. 2021.
TIMM_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
# By size, the patches and images that timm 1.0 has.
TIMM_IMAGES = {
    "tiny": ((16, 224), (16, 384)),
    "small": ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
    "base": ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
    "large": ((14, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
}
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
    for patch, side in TIMM_IMAGES[size]
}


def _vit_values(hf: HFConfig) -> Values:
    size = get(hf, "image_size")
    height, width = (size, size) if isinstance(size, int) else size
    found = sizes(hf, VIT_SIZES)
    check_entries(hf, {"head_dim": (found["width"] // found["heads"], None)})
    return {
        **found,
        "image": (height, width, hf.get("num_channels", 3)),
        "pool": "class",
        "classes": label_count(hf),
    }


def _vit_entries(model: Any) -> Values:
    height, width, _ = model.shape
    return {
        **size_entries(model, VIT_SIZES),
        "image_size": list(model.shape[:2]) if height != width else height,
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
    yield from block_leaves(model, "vit.encoder.layer.{}", qkv, names)
    yield from layer_norm_leaves("norm", "vit.layernorm")
    yield from linear_leaves("head", "classifier", model.width, model.classes)


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
    yield from block_leaves(model, "blocks.{}", ("attn.qkv",), names)
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
    values=lambda hf: timm_values(hf, TIMM_VITS[hf["architecture"]]),
    hf=lambda model: timm_entries(TIMM_VITS, model, head="head", first="patch_embed.proj"),
    leaves=_timm_leaves,
)
