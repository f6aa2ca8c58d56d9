"""A model of ours as a folder that Hugging Face's `transformers` loads."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.safetensors import INDEX_SUFFIX, SUFFIX, write_safetensors
from jtrain.models.pretrained.families.images import label_count, timm_classes
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values
from jtrain.models.pretrained.folder import CONFIG, write_preprocessor
from jtrain.models.pretrained.tensors_table import published_shapes

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
SHARD = 5_000_000_000  # bytes of a file, as transformers has it
# Files of a tokenizer, and how to generate; they are copied.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# Entries about the classes of a head, of transformers and of timm.
CLASSES = ("id2label", "label2id", "num_labels", "num_classes", "label_names", "label_descriptions")


class Export(NamedTuple):
    """What was written."""

    directory: Path
    family: str
    dtype: str
    tensors: int
    bytes: int
    copied: tuple[str, ...]
    of_images: bool


def write_folder(
    directory: Path,
    family: Family,
    model: Any,
    read: Callable[[str], np.ndarray],
    *,
    dtype: DType = "float32",
    base: HFConfig | None = None,
    beside: Path | None = None,
    shard: int = SHARD,
) -> Export:
    """Write config.json and safetensors, a tensor at a time.

    Args:
        directory: is made; must be empty.
        read: returns a parameter by our name, of blocks one by one.
        dtype: of the tensors with floating numbers.
        base: entries of the config.json that the model came from, which are kept.
        beside: the folder whose tokenizer is copied.
        shard: most bytes of a file.

    Raises:
        CheckpointError: if the directory has files, or cannot be written.
    """
    check_empty(directory)
    ordered = _ordered_leaves(family, model)
    leaves = {their: leaf for leaf in ordered for their in leaf.theirs}
    shapes, kind = published_shapes(family, model), jnp.dtype(dtype)
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, kind if floating(x) else x.dtype)
    tensors = {name: cast(shapes[name]) for name in leaves}
    pieces = functools.lru_cache(maxsize=1)(lambda leaf: leaf.transform.split((read(leaf.ours),)))

    def tensor(name: str) -> np.ndarray:
        leaf: Leaf = leaves[name]
        return np.asarray(pieces(leaf)[leaf.theirs.index(name)]).astype(tensors[name].dtype)

    size = 0
    files = _files(tensors, shard)
    for file, names in files.items():
        described = {name: tensors[name] for name in names}
        size += write_safetensors(directory / file, described, {"format": "pt"}, tensor)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    config = hf_config(family, model, dtype, base or {})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if hasattr(model, "pixels") and not family.timm:
        write_preprocessor(directory, model)
    copied = [name for name in BESIDE if beside and (beside / name).is_file()]
    for name in copied:
        assert beside is not None, "nothing was copied from nowhere"
        shutil.copyfile(beside / name, directory / name)
    return Export(
        directory, family.name, dtype, len(tensors), size, tuple(copied), hasattr(model, "pixels")
    )


def hf_config(family: Family, model: Any, dtype: DType, base: HFConfig) -> Values:
    """Return config.json for our config, over the entries of `base`."""
    entries, classes = family.hf(model), (timm_classes if family.timm else label_count)(base)
    if getattr(model, "classes", classes) != classes:
        base = without_class_names(base)
    if family.timm:
        # `test_...` is another size and crop, for evaluation alone: jtrain has one for all.
        about = base.get("pretrained_cfg", {})
        about = {key: x for key, x in about.items() if not key.startswith("test_")}
        return {**base, **entries, "pretrained_cfg": about | entries["pretrained_cfg"]}
    # Rotary positions are written as rope_theta and rope_scaling, which every reader knows.
    kept: Values = {k: x for k, x in base.items() if k not in {"rope_parameters", "dtype"}}
    if "id2label" in kept:  # names, in place of LABEL_0 and so on
        entries = without_class_names(entries)
    if family.kind == "transformer" and not base:
        # Defaults of transformers are those of a published model: its Llamas stop at token 2.
        kept = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {
        **kept,
        "architectures": [family.architecture],
        "model_type": family.name,
        "torch_dtype": dtype,
        **entries,
    }


def without_class_names(hf: HFConfig) -> Values:
    """Return a config.json without the number and the names of its classes."""
    return {key: x for key, x in hf.items() if key not in CLASSES}


def check_empty(directory: Path) -> None:
    """Raise CheckpointError if a directory has files, or is a file."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} is not an empty directory, and nothing is written over other files. "
            f"Name another directory."
        )


def _ordered_leaves(family: Family, model: Any) -> list[Leaf]:
    """Return the table in the order in which a parameter, or a stack of blocks, is read once."""
    leaves = list(family.leaves(model))
    if not getattr(model, "scan", False):
        return leaves
    return sorted(leaves, key=lambda leaf: re.sub(r"^blocks/\d+", "blocks", leaf.ours))


def _files(tensors: Mapping[str, jax.ShapeDtypeStruct], shard: int) -> dict[str, list[str]]:
    """Return the tensors of each file, by its name."""
    groups: list[list[str]] = [[]]
    room = shard
    for name, like in tensors.items():
        size = like.size * like.dtype.itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = shard
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}{SUFFIX}": group for i, group in enumerate(groups, 1)}
