"""Export of a run as a folder that `transformers` loads."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import inspect, layout, leaf_table
from jtrain.checkpoint.init_from import is_requested
from jtrain.config.resolve import resolve
from jtrain.errors import CheckpointError
from jtrain.finetune.lora import Lora
from jtrain.models.pretrained.families import family_name, family_of
from jtrain.models.pretrained.source import is_pretrained, read_hf_config
from jtrain.models.pretrained.tensors_table import model_shapes
from jtrain.models.pretrained.write import Export, check_empty, without_class_names, write_folder
from jtrain.train.export_lora import has_terms, merged_reader

DTYPES = ("float32", "bfloat16", "float16")


def export_hf(config: Path, directory: Path, step: int, out: Path, dtype: str = "") -> Export:
    """Write the trained parameters of a checkpoint as a folder of the family that computes them.

    The terms of a run with LoRA are added to the weights beside them.

    Args:
        config: the run's config file.
        directory: of its checkpoints.
        step: of the checkpoint.
        out: the new folder.
        dtype: of the tensors; empty: that of the model that the run came from, or float32.

    Raises:
        CheckpointError: if no family computes the model, or the folder cannot be written.
    """
    check_empty(out)
    resolved = resolve(config).config
    model, lora = getattr(resolved, "model", None), getattr(resolved, "lora", Lora())
    layout.check_valid(directory, step)
    record = layout.read_record(directory, step)["leaves"]
    if model is None or not hasattr(model, "build"):
        raise CheckpointError(
            f"{config} has no `model` that is a network of jtrain, and only those have a published "
            f"family. Export the tensors: --to safetensors"
        )
    model = with_sizes_of_data(model, directory, step, record)
    source = Path(getattr(model, "pretrained", "") or "")
    known = bool(source.name) and is_pretrained(source)
    base = read_hf_config(source) if known else {}
    start = resolved.init_from
    if start.path or not is_requested("head/bias", start):
        base = without_class_names(base)  # they are of another head
    family = family_of(model, family_name(base))
    chosen = dtype or base.get("torch_dtype") or base.get("dtype") or "float32"
    return write_folder(
        out,
        family,
        model,
        _reader(model, lora, directory, step, record),
        dtype=chosen if chosen in DTYPES else "float32",
        base=base if family_name(base) == family.name else {},
        beside=source if known and source.is_dir() else None,
    )


def with_sizes_of_data(model: Any, directory: Path, step: int, record: Any) -> Any:
    """Return the config with the sizes that its data gave, by the leaves of the checkpoint.

    They are the vocabulary of a text model, and images and classes of an image classifier.
    """
    if hasattr(model, "for_leaves"):
        prefix = "extra/base/" if has_terms(record) else "params/"
        if f"{prefix}head/bias" not in record:
            return model
        return model.for_leaves(lambda name: _stored_shape(record, prefix, name))
    if getattr(model, "vocab", None) != 0:
        return model
    name = "extra/base/tokens" if has_terms(record) else "params/tokens"
    if (terms := "params/tokens/a") in record:  # a row of `a` for each token
        name = terms
    if name not in record:
        return model
    return model.for_tokens(len(inspect.read_arrays(directory, step, [name])[name]))


def _stored_shape(record: Any, prefix: str, name: str) -> tuple[int, ...]:
    """Return the shape of a leaf; (inputs, outputs) of one that is stored in fewer bits."""
    if stored := record.get(f"{prefix}{name}"):
        return leaf_table.parse_leaf(stored).shape
    a, b = (leaf_table.parse_leaf(record[f"params/{name}/{term}"]).shape for term in "ab")
    return a[0], b[-1]


def _reader(
    model: Any, lora: Lora, directory: Path, step: int, record: Any
) -> Callable[[str], np.ndarray]:
    """Return a function that reads a parameter by its name, of blocks one by one."""

    def read_leaf(full: str) -> np.ndarray:
        return inspect.read_arrays(directory, step, [full])[full]

    read_full = merged_reader(model, lora, read_leaf) if lora.rank else read_leaf

    @functools.lru_cache(maxsize=1)
    def stored(name: str) -> np.ndarray:
        return read_full(_stored_name(name))

    def read(name: str) -> np.ndarray:
        if not (getattr(model, "scan", False) and name.startswith("blocks/")):
            return stored(name)
        _, index, rest = name.split("/", 2)
        return stored(f"blocks/{rest}")[int(index)]

    shapes = model_shapes(model)
    scanned = getattr(model, "scan", False)
    missing = [] if scanned or lora.rank else [n for n in shapes if _stored_name(n) not in record]
    if missing:
        raise CheckpointError(
            f"{directory / str(step)} should have {_stored_name(missing[0])} for its config, and "
            f"has {', '.join(list(record)[:5])}. Export a run that was trained with its config."
        )
    return read


def _stored_name(name: str) -> str:
    return name if name.startswith("extra/") else f"params/{name}"
