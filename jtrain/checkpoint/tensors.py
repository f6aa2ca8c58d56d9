"""Files of named tensors in the safetensors format, read a slice at a time.

The format: 8 bytes, little endian, the length of a header; the header, JSON, with the dtype, the
shape and the place of each tensor; then the tensors. Source: https://github.com/huggingface/
safetensors. Read here by numpy: its own reader needs torch for bfloat16, and gives whole tensors to
one device in JAX.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.private_files import resolve_inside
from jtrain.io.regular_files import open_regular, parse_json

ENDING, INDEX = ".safetensors", ".safetensors.index.json"
HEADER = 100_000_000  # bytes: the format's own bound
DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64,
    "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Each tensor of a file by its name, mapped: the disk is read where a slice is.

    An index names the files, beside it, that hold the parts of one model.

    Raises:
        CheckpointError: if a file is not there, or not what the format says.
    """
    if not path.name.endswith(INDEX):
        return _of_file(path)
    files: Mapping[str, str] = _json(path, _bytes(path), "weight_map")
    if not all(isinstance(name, str) for name in files.values()):
        raise _broken(path, "its weight_map names no files")
    beside = lambda name: resolve_inside(path.parent, name, CheckpointError, path)
    parts = {name: _of_file(beside(name)) for name in {name: None for name in files.values()}}
    lost = [name for name, file in files.items() if name not in parts[file]]
    if lost:
        raise CheckpointError(
            f"{path} says that {files[lost[0]]} has {lost[0]}, and it has not. Download both again."
        )
    return {name: parts[file][name] for name, file in files.items()}


def _of_file(path: Path) -> dict[str, np.ndarray]:
    data = _bytes(path)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > len(data) - 8:
        raise _broken(path, f"its header is to be {length} bytes, of {max(0, len(data) - 8)}")
    header = _json(path, data[8 : 8 + length])
    data = data[8 + length :]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = {name: _tensor(path, name, entry, data) for name, entry in entries.items()}
    _refuse_overlaps(path, {name: entries[name]["data_offsets"] for name in found})
    return found


def _refuse_overlaps(path: Path, places: Mapping[str, list[int]]) -> None:
    """Raise CheckpointError if two tensors share a byte: a small file could stand for any size."""
    end, before = 0, ""
    for name, (first, last) in sorted(places.items(), key=lambda item: item[1]):
        if first < min(end, last):
            raise _broken(path, f"{name} is to lie at {first} to {last}, where {before} lies")
        end, before = max((end, before), (last, name))


def _tensor(path: Path, name: str, entry: Any, data: np.ndarray) -> np.ndarray:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"of {name} its header says {entry!r}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} is of the type {dtype}; those that can be read are "
            f"{', '.join(DTYPES)}. Convert the file to one of them."
        )
    numbers = np.dtype(DTYPES[dtype])
    counts = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    places = type(first) is int and type(last) is int and 0 <= first <= last <= len(data)
    if not (counts and places) or last - first != math.prod(shape) * numbers.itemsize:
        raise _broken(path, f"{name} is to lie at {first} to {last} of {len(data)} bytes")
    return data[first:last].view(numbers).reshape(shape)


def _bytes(path: Path) -> np.ndarray:
    try:
        with open_regular(path) as file:
            whole = os.fstat(file.fileno()).st_size
            return np.memmap(file, np.uint8, "r") if whole else np.empty(0, np.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{path} was to be read, and cannot be ({error.strerror}). Name another file by "
            f"init_from.path."
        ) from None


def _json(path: Path, text: np.ndarray, key: str = "") -> dict:
    try:
        if len(text) > HEADER:
            raise ValueError(f"a header of {len(text):,} bytes, and at most {HEADER:,} are read")
        found = parse_json(text.tobytes())
        return dict(found[key] if key else found)
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from None


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no whole file of tensors: {what}. Download it, or write it, again."
    )
