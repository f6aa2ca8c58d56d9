"""A folder as Hugging Face lays it out: config.json, safetensors, and what is done to images."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.regular_files import read_json
from jtrain.io.safetensors import INDEX_SUFFIX, SUFFIX, read_tensors
from jtrain.models.images import Pixels
from jtrain.models.pretrained.families.entries import get
from jtrain.models.pretrained.family import Family, HFConfig, Supported, Values, check_entries

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OF_TRAINING = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
PART = re.compile(r"(.+)-\d+-of-(\d+)")  # a name of one of several files of weights


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of a published model or adapter, or what is left of one."""
    return (path / CONFIG).is_file() or is_adapter(path)


def is_adapter(path: Path) -> bool:
    """Return whether a path is a folder of an adapter alone, whose model is elsewhere."""
    return (path / ADAPTER).is_file() and not (path / CONFIG).is_file()


def read_config(folder: Path, name: str = CONFIG) -> HFConfig:
    """Return the content of config.json, or of another file of a folder."""
    path = folder / name
    try:
        found = read_json(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Name a folder whose files can be: "
            f"{CONFIG}, tensors as {SUFFIX} and tokenizer.json."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Download it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a JSON object. "
                              f"Download it again.")  # fmt: skip
    return found


def read_folder(folder: Path) -> Mapping[str, np.ndarray]:
    """Map the tensors of a folder; the disk is read where a slice is used."""
    if (folder / ADAPTER).is_file():  # `transformers` would add it
        raise CheckpointError(
            f"{folder} has an {ADAPTER}, and its adapter would be left out. Merge it into the "
            f"weights (merge_and_unload of the package peft), or remove that file."
        )
    for name in (f"model{SUFFIX}", f"model{INDEX_SUFFIX}"):  # in the order of `transformers`
        if (folder / name).is_file():
            return read_tensors(folder / name)
    files = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    if len(files) == 1:
        return read_tensors(files[0])
    if files:
        raise CheckpointError(
            f"{folder} has {', '.join(path.name for path in files)} and no model{INDEX_SUFFIX} "
            f"that says which tensor is in which. Download the index, too."
        )
    if pickles := _weight_pickles(folder):
        check_no_pickle(pickles[0])
    raise CheckpointError(
        f"{folder} has a {CONFIG} and no file of tensors. Download model{SUFFIX}."
    )


def check_no_pickle(path: Path) -> None:
    """Raise CheckpointError if a path is named as torch names pickles."""
    if path.suffix in PICKLES:
        part = PART.fullmatch(path.stem)
        pattern = f"{part[1]}-*-of-{part[2]}{path.suffix}" if part else path.name
        raise CheckpointError(
            f"{path} is a pickle, and reading a pickle runs any program that is in it: jtrain "
            f"reads none. Convert it once, with torch's restricted reader:\n"
            f'python -c "import pathlib, torch, safetensors.torch as s; '
            f"s.save_file({{k: v.clone().contiguous() "
            f"for p in pathlib.Path('{path.parent}').glob('{pattern}') "
            f"for k, v in torch.load(p, weights_only=True).items()}}, "
            f"'{path.with_name(f'model{SUFFIX}')}')\""
        )


def _weight_pickles(folder: Path) -> list[Path]:
    """Return the pickles that may hold weights, torch's name for them first."""
    files = [path for path in folder.iterdir() if path.suffix in PICKLES]
    weights = [path for path in files if not path.name.startswith(OF_TRAINING)]
    return sorted(weights, key=lambda path: (not path.name.startswith("pytorch_model"), path))


PREPROCESSOR = "preprocessor_config.json"
PREPROCESSOR_ENTRIES: Supported = dict.fromkeys(
    ("do_flip_channel_order", "rescale_offset", "do_pad"), (False, None)
)
"""Values that `Pixels` has."""


def read_pixels(folder: Path, family: Family, hf: HFConfig, model: Any) -> Values:
    """Return the fields of `Pixels` for an image classifier, whose config of ours is `model`.

    They are those of preprocessor_config.json, or of timm's `pretrained_cfg`. Where neither gives a
    size, it is that of the images for a model whose parameters depend on it, and else the data's.
    """
    height, width, channels = model.image
    found: Values = {"channels": channels, **_default_range(family, channels)}
    if hasattr(model, "positions"):
        found |= {"height": height, "width": width}
    if not family.timm:
        return found | _from_file(folder)
    cfg = hf.get("pretrained_cfg") or {}
    found |= {key: tuple(cfg[key]) for key in ("mean", "std") if key in cfg}
    if "input_size" in cfg:
        _, found["height"], found["width"] = cfg["input_size"]
    return found


def assumed_range(folder: Path, family: Family, hf: HFConfig, model: Any) -> list[str]:
    """Return a line about the range of the pixels, where neither the folder nor `model` sets it."""
    if family.timm:
        file, stated = "config.json", "mean" in (hf.get("pretrained_cfg") or {})
    else:
        file, found = PREPROCESSOR, _preprocessor(folder)
        stated = "image_mean" in found or not found.get("do_normalize", True)
    assumed = _default_range(family, model.shape[2]).get("mean", ())
    if stated or model.pixels.mean != assumed:
        return []
    mean = f"mean and std {family.mean} are assumed" if assumed else "they stay in 0 .. 1"
    return [
        f"{folder}: no {file} says with which mean and std of its pixels the model was trained, "
        f"and {mean}. If that is wrong, download the file, or set them, such as ImageNet's: "
        f"model.pixels.mean=[0.485,0.456,0.406] model.pixels.std=[0.229,0.224,0.225]"
    ]


def _default_range(family: Family, channels: int) -> Values:
    if family.mean is None:
        return {}
    return {"mean": (family.mean,) * channels, "std": (family.mean,) * channels}


def _preprocessor(folder: Path) -> HFConfig:
    """Return the content of preprocessor_config.json; empty if there is none."""
    if not (folder / PREPROCESSOR).is_file():
        return {}
    hf = dict(read_config(folder, PREPROCESSOR))
    for key in ("size", "crop_size"):
        if isinstance(hf.get(key), int):  # of older files
            hf[key] = {"height": hf[key], "width": hf[key]}
    check_entries(hf, PREPROCESSOR_ENTRIES, file=f"{folder / PREPROCESSOR}", family="images")
    return hf


def _from_file(folder: Path) -> Values:
    hf = _preprocessor(folder)
    rescale, factor = hf.get("do_rescale", True), hf.get("rescale_factor", 1 / 255)
    if not rescale or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(
            f"{folder / PREPROCESSOR} has do_rescale={rescale} and rescale_factor={factor}, and "
            f"jtrain scales bytes to 0 .. 1: true and {1 / 255:.6f}. Fold another factor into "
            f"image_mean and image_std."
        )
    found: Values = {}
    if hf.get("do_normalize", True) and "image_mean" in hf:
        std = get(hf, "image_std", file=PREPROCESSOR)
        found = {"mean": tuple(hf["image_mean"]), "std": tuple(std)}
    if hf.get("do_resize", True) and (size := _size(hf)):
        found["height"], found["width"] = size
    return found


def _size(hf: HFConfig) -> tuple[int, int] | None:
    """Return the height and the width of what is left of an image."""
    size = hf.get("crop_size") if hf.get("do_center_crop") else None
    size = size or hf.get("size")
    if not size:
        return None
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    return (size["height"], size["width"]) if {"height", "width"} <= size.keys() else None


def write_preprocessor(directory: Path, model: Any) -> None:
    """Write preprocessor_config.json: what is done to images before a model of ours."""
    pixels: Pixels = model.pixels
    sized = pixels.height > 0 or hasattr(model, "positions")  # else images keep their size
    entries: Values = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": sized,
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(pixels.mean),
    }
    if sized:
        entries["size"] = {"height": model.shape[0], "width": model.shape[1]}
    if pixels.mean:
        entries |= {"image_mean": list(pixels.mean), "image_std": list(pixels.std)}
    (directory / PREPROCESSOR).write_text(json.dumps(entries, indent=2) + "\n")
