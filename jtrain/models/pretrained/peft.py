"""LoRA adapters as the package `peft` lays them out: adapter_config.json beside safetensors."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.hub import is_hub_name, split_name
from jtrain.io.safetensors import read_tensors, write_safetensors
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Supported, check_entries
from jtrain.models.pretrained.folder import ADAPTER, read_config
from jtrain.models.pretrained.tensors_table import Tensors

TENSORS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# Families whose linear maps are stored as i o, which peft calls fan_in_fan_out.
_COLUMNS = {"gpt2"}
_ENTRIES: Supported = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}
"""Values that are computed; another initial value, such as PiSSA's, changes the base as well."""
_OTHERS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "r",
    "inference_mode", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
    "fan_in_fan_out", "use_rslora", "eva_config", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size",
}  # fmt: skip
"""Entries without an effect of their own; one that is in neither table is refused unless empty."""


def base_of(folder: Path) -> str:
    """Return the name of the model that the adapter in a folder belongs to.

    Raises:
        CheckpointError: if the adapter does not name it.
    """
    config = read_config(folder, ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{folder / ADAPTER} has no base_model_name_or_path, the model that the adapter is "
            f"added to. Write the name, or the folder, of that model there."
        )
    return f"{base}@{revision}" if revision and is_hub_name(base) else base


def write_terms(
    folder: Path,
    family: Family,
    model: Any,
    terms: Mapping[str, tuple[np.ndarray, np.ndarray]],
    settings: Mapping[str, Any],
    base: str,
) -> int:
    """Write adapter_config.json and the tensors of an adapter; return the bytes of the tensors.

    A kernel of several modules, such as qkv, gives each of them its A, and its rows of B.

    Args:
        family: the family that computes the function of `model`, whose blocks are not stacked.
        terms: A (i r) of each kernel; and B, r o or o r as the kernel is i o or o i.
        settings: `r`, `lora_alpha` and `lora_dropout` of the adapter.
        base: name or folder of the model that the adapter is added to; empty: not known.
    """
    rows = {leaf.ours: leaf for leaf in family.leaves(model)}
    tensors: dict[str, np.ndarray] = {}
    for name, (a, b) in terms.items():
        for module, part in zip(
            _modules(rows[name]), rows[name].transform.split((b,)), strict=True
        ):
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = a.T
            tensors[f"{key}.lora_B.weight"] = part.T if family.name in _COLUMNS else part
    folder.mkdir(parents=True, exist_ok=True)
    repo, revision = split_name(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if family.kind == "transformer" else "FEATURE_EXTRACTION",
        "base_model_name_or_path": repo if is_hub_name(base) else base or None,
        "revision": revision if is_hub_name(base) and repo != base else None,
        **settings,
        "target_modules": _targets(map(rows.__getitem__, terms), rows.values()),
        "fan_in_fan_out": family.name in _COLUMNS,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
    whole = {name: np.ascontiguousarray(x, np.float32) for name, x in sorted(tensors.items())}
    return write_safetensors(folder / TENSORS, whole, {"format": "pt"})


def add_adapter(folder: Path, family: Family, tensors: Tensors) -> Tensors:
    """Return the tensors of a model with the terms of an adapter, added where one is read.

    Raises:
        CheckpointError: if the adapter computes something else, or belongs to another model.
    """
    config, columns = read_config(folder, ADAPTER), family.name in _COLUMNS
    scale = _scale(folder, config)
    names = {_bare(family, name): name for name in tensors}
    added = dict(tensors)
    for module, (a, b) in _read_modules(folder, family).items():
        name = names.get(f"{module}.weight", "")
        shape = getattr(tensors.get(name), "shape", ())
        product = (*b.shape[:-1], *a.shape[1:]) if b.shape[-1:] == a.shape[:1] else ()
        if not name or product != (shape[::-1] if columns else shape):
            size = " x ".join(map(str, shape)) if name else "not there"
            raise CheckpointError(
                f"{folder} is an adapter of another base: B A of {module} is "
                f"{' x '.join(map(str, product)) or 'broken'}, and {module}.weight is {size}. "
                f"Write the model that it was trained on as base_model_name_or_path in {ADAPTER} "
                f"(now {config.get('base_model_name_or_path')})."
            )
        added[name] = _Sum(tensors[name], (a.T, b.T) if columns else (b, a), scale)
    return added


def _scale(folder: Path, config: HFConfig) -> float:
    """Return the factor of the products; raise CheckpointError for what is not computed."""
    file = str(folder / ADAPTER)
    others = {key: (None,) for key in config.keys() - _OTHERS - _ENTRIES.keys() if config[key]}
    check_entries(config, {**_ENTRIES, **others}, file=file, family="peft")
    try:
        rank = float(config["r"])
        return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise CheckpointError(
            f"{file} has no numbers r and lora_alpha. Download it again."
        ) from None


class _Sum:
    """Tensor with a low-rank term, which is computed by np.asarray."""

    def __init__(self, tensor: Any, factors: tuple[np.ndarray, np.ndarray], scale: float):
        self.shape, self.dtype = tensor.shape, np.dtype(np.float32)
        self._tensor, self._factors, self._scale = tensor, factors, np.float32(scale)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy
        left, right = self._factors
        return np.asarray(self._tensor, np.float32) + self._scale * (left @ right)


def _read_modules(folder: Path, family: Family) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A (r i) and B (o r) of each module, by its name without the family's prefix."""
    if not (folder / TENSORS).is_file():
        raise CheckpointError(
            f"{folder} has an {ADAPTER} and no {TENSORS}. Write it with peft: "
            f"model.save_pretrained({str(folder)!r})"
        )
    tensors = read_tensors(folder / TENSORS)
    pairs = {key: key.replace(".lora_A.", ".lora_B.") for key in tensors if ".lora_A." in key}
    other = [key for key in tensors if not _KEY.fullmatch(key)]
    if other := [*other, *(tensors.keys() ^ {*pairs, *pairs.values()})]:
        raise CheckpointError(
            f"{folder / TENSORS}: {other[0]} is not a term of a linear layer, or half of one, and "
            f"jtrain adds no other. Merge the adapter with peft (merge_and_unload), and name the "
            f"folder that save_pretrained writes."
        )
    wide = lambda key: np.asarray(tensors[key], np.float32)
    return {_bare(family, _KEY.sub(r"\1", a)): (wide(a), wide(b)) for a, b in pairs.items()}


def _modules(leaf: Leaf) -> list[str]:
    return [theirs.removesuffix(".weight") for theirs in leaf.theirs]


def _bare(family: Family, module: str) -> str:
    return module.removeprefix(family.prefix)


def _targets(chosen: Iterable[Leaf], known: Iterable[Leaf]) -> list[str]:
    """Return the last names of modules; complete names if others have the same last names."""
    modules = {module for leaf in chosen for module in _modules(leaf)}
    last = lambda module: module.rpartition(".")[2]
    ends = set(map(last, modules))
    same = {m for leaf in known for m in _modules(leaf) if last(m) in ends} == modules
    return sorted(ends if same else modules)
