"""Folders as timm lays them out: config.json names an architecture, and has no sizes."""

from collections.abc import Mapping
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.checks import NUMBER, SIZE, Supported, is_list_of
from jtrain.models.pretrained.family import HFConfig, Values

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
