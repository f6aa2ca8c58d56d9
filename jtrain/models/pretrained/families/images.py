"""What families of image classifiers share, and folders as timm lays them out."""

from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families.entries import COMMON
from jtrain.models.pretrained.family import (
    NUMBER,
    OBJECT,
    SIZE,
    TEXT,
    HFConfig,
    Leaf,
    Supported,
    Transform,
    Values,
    is_list_of,
    layer_norm_leaves,
    linear,
    single,
)

CONVOLUTION = single(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""Between o i k k and k k i o."""
IMAGE_ENTRIES: Supported = {
    **COMMON,
    "num_channels": (SIZE,),
    "num_labels": (SIZE, None),
    "id2label": (OBJECT, is_list_of(TEXT), None),
}
"""Entries of a classifier of `transformers`."""
COUNTERS = ("num_batches_tracked",)  # of the norms: a fixed momentum does not read them


def label_count(hf: HFConfig) -> int:
    """Return the number of classes of a config.json of transformers, whose default is 2."""
    return hf.get("num_labels") or len(hf.get("id2label") or {}) or 2


def label_entries(classes: int) -> Values:
    """Return names for classes that have none; those of the source are written in their place."""
    names = {str(i): f"LABEL_{i}" for i in range(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def batch_norm_leaves(ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield scale and bias, and the running statistics, which a model carries as `extra`."""
    yield from layer_norm_leaves(ours, theirs)
    yield Leaf(f"extra/{ours}/mean", (f"{theirs}.running_mean",))
    yield Leaf(f"extra/{ours}/var", (f"{theirs}.running_var",))


def convolution_leaves(ours: str, theirs: str, our_norm: str, their_norm: str) -> Iterator[Leaf]:
    """Yield a convolution without a bias, and its norm."""
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), CONVOLUTION)
    yield from batch_norm_leaves(our_norm, their_norm)


def patches(patch: int, channels: int, width: int) -> Transform:
    """Return the transform of a convolution o i k k to a linear map of patches, k k i."""
    inputs = patch * patch * channels
    flat = single(
        lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], -1),
        lambda x: x.reshape(-1, patch, patch, channels).transpose(0, 3, 1, 2),
    )
    return flat.then(linear(inputs, width))


def square(image: tuple[int, int, int]) -> int | list[int]:
    """Return height and width as config.json has them: a number if they are equal."""
    height, width, _ = image
    return height if height == width else [height, width]


def sides(size: int | list[int]) -> tuple[int, int]:
    """Return height and width for an entry of config.json."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


TIMM_ENTRIES: Supported = {
    "num_classes": (SIZE, None),
    "model_args": (None, {}),
    "pretrained_cfg": {
        "num_classes": (SIZE, None),
        "input_size": (is_list_of(SIZE, length=3),),
        "mean": (is_list_of(0, NUMBER),),
        "std": (is_list_of(NUMBER),),
    },
}
"""Entries of a config.json of timm."""


def timm_classes(hf: HFConfig) -> int:
    """Return the number of classes of a config.json of timm, whose default is ImageNet's."""
    cfg = hf.get("pretrained_cfg") or {}
    return hf.get("num_classes") or cfg.get("num_classes") or 1000


def timm_image(hf: HFConfig, image: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return height, width and channels of the images of a config.json, which may not say them."""
    channels, height, width = (hf.get("pretrained_cfg") or {}).get("input_size") or (
        image[2],
        *image[:2],
    )
    return height, width, channels


def timm_entries(
    architectures: Mapping[str, Values], model: Any, *, head: str, first: str
) -> Values:
    """Return config.json for our config.

    Args:
        architectures: fields of our config by the name of an architecture.
        head, first: the names of the last and of the first layer.

    Raises:
        CheckpointError: if no architecture has these sizes.
    """
    height, width, channels = model.shape
    pixels = model.pixels
    for name, values in architectures.items():
        fields = {key: value for key, value in values.items() if key != "image"}
        ours = {key: _explicit(model, key) for key in fields}
        side = values.get("image", (height, width, channels))
        if ours == fields and side == (height, width, channels):
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


def _explicit(model: Any, name: str) -> Any:
    return model.size_of_hidden if name == "hidden" else getattr(model, name)
