"""Values of published models: the config.json of a folder, and the fields of our config for it."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.hub import local_folder
from jtrain.io.safetensors import INDEX_SUFFIX
from jtrain.models.pretrained.families import (
    FAMILIES,
    build_model,
    family_name,
    find_family,
    model_values,
)
from jtrain.models.pretrained.family import HFConfig
from jtrain.models.pretrained.folder import (
    assumed_range,
    check_no_pickle,
    is_adapter,
    is_folder,
    read_config,
    read_folder,
    read_pixels,
)
from jtrain.models.pretrained.gguf import GGUF, read_gguf
from jtrain.models.pretrained.peft import base_of
from jtrain.models.pretrained.tensors_table import HEAD

TIED = "tie_word_embeddings"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")  # of families with a head of words


def read_values(path: str, cls: Any) -> Mapping[str, Any]:
    """Return the fields of our config, a `cls`, for a folder or a GGUF file.

    Raises:
        CheckpointError: if jtrain does not compute the model, or it is of another kind.
    """
    hf = read_hf_config(path)
    family = find_family(hf, path)
    if family.kind != cls.kind:
        raise CheckpointError(
            f"model.from={path} is a {family.name}, which jtrain has as kind={family.kind}, and "
            f"the model of this experiment is a {cls.kind}. Use an experiment with such a model."
        )
    model = build_model(cls, family, hf)
    values = model_values(model)
    if "pixels" in values:
        folder = local_folder(name_of_base(path), weights=False)
        pixels = read_pixels(folder, family, hf, model)
        values["pixels"] = {**values["pixels"], **pixels}
    return values


def read_hf_config(name: str | Path) -> HFConfig:
    """Return the config.json of a folder or a name on the Hub, or the entries of a GGUF file.

    An adapter of peft has that of its base.

    A head that differs from the embedding is used, also where config.json ties them: programs that
    train parts of a model apart write both. `transformers` 5 does the same.
    """
    name = name_of_base(str(name))
    path = local_folder(name, weights=False)
    if path.suffix == GGUF:
        return read_gguf(path).config
    check_no_pickle(path)
    if not is_folder(path):
        raise CheckpointError(
            f"{name} is neither a folder with a config.json nor a {GGUF} file. Name a folder as "
            f"Hugging Face lays it out (config.json, model.safetensors, tokenizer.json), or a "
            f"{GGUF} file."
        )
    hf = read_config(path)
    return {**hf, TIED: False} if _has_own_head(name, hf) else hf


def name_of_base(name: str) -> str:
    """Return the name of the model that an adapter belongs to; of another model, its own."""
    path = local_folder(name, weights=False)
    return base_of(path) if is_adapter(path) else name


def _has_own_head(name: str, hf: HFConfig) -> bool:
    """Return whether a model's config.json ties the head, and its tensors do not."""
    family = FAMILIES.get(family_name(hf))
    if family is None or not family.read(hf).get("tied"):
        return False
    path = local_folder(name, weights=False)
    index = path / f"model{INDEX_SUFFIX}"
    if index.is_file() and not str(read_config(path, index.name)).count(HEAD):
        return False
    path = local_folder(name)
    files = sorted(path.glob("*.safetensors*"))
    stats = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _heads_differ(path, stats)


@functools.lru_cache(maxsize=8)
def _heads_differ(path: Path, stats: tuple) -> bool:
    del stats
    try:
        tensors = read_folder(path)
    except CheckpointError:  # a folder without tensors has values
        return False
    found = [x for name, x in tensors.items() if name.endswith((HEAD, *EMBEDDINGS))]
    if len(found) != 2:
        return False
    one, other = found
    if one.shape != other.shape:
        return True
    return any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))  # row by row


def describe_source(model: Any) -> list[str]:
    """Return lines where a config of ours has what the config.json of its folder does not say."""
    name = getattr(model, "pretrained", "")
    path = folder_if_any(name)
    if path is None or not is_folder(path) or is_adapter(path):
        return []
    hf = read_config(path)
    if hasattr(model, "pixels"):
        return assumed_range(path, find_family(hf, name), hf, model)
    if getattr(model, "tied", True) or not _has_own_head(name, hf):
        return []
    return [
        f"{name}: config.json ties the head to the embedding, and {HEAD} differs from it: that "
        f"head is used. If the embedding should be the head: model.tied=true"
    ]


def folder_if_any(name: str) -> Path | None:
    """Return the folder or file in `model.from`; None if there is none, or none any more.

    A resumed run reads nothing of it, and needs no Hub.
    """
    if not name:
        return None
    try:
        path = local_folder(name, weights=False)
    except CheckpointError:
        return None
    return path if path.exists() else None
