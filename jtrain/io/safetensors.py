"""Files of named tensors in the safetensors format, read a slice at a time.

The format: 8 bytes, little endian, the length of a header; the header, JSON, with the dtype, the
shape and the offsets of each tensor; then the tensors. Source:
https://github.com/huggingface/safetensors. Read by numpy: the safetensors library needs torch for
bfloat16, and gives whole tensors to one device in JAX.
"""

import itertools
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.gguf_header import map_bytes
from jtrain.io.regular_files import atomic_write, parse_json, resolve_inside

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
HEADER = 1 << 25
"""Most bytes of a header, that of 300,000 tensors. Parsed, it takes up to 30 times that: 1 GB; the
format's own limit of 100 MB would be 3 GB."""
DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64,
    "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Map each tensor of a file by its name: the disk is read where a slice is used.

    An index names the files, in the same folder, that hold the tensors of one model.

    Raises:
        CheckpointError: if a file is missing, or violates the format.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return _read_file(path)
    files: Mapping[str, str] = _parse_header(path, map_bytes(path), "weight_map")
    if not all(isinstance(name, str) for name in files.values()):
        raise _broken_error(path, "its weight_map names no files")
    parts = {
        name: _read_file(resolve_inside(path.parent, name, CheckpointError, path))
        for name in dict.fromkeys(files.values())
    }
    missing = [name for name, file in files.items() if name not in parts[file]]
    if missing:
        raise CheckpointError(
            f"{path} expects {missing[0]} in {files[missing[0]]}, which lacks it. Download "
            f"both again."
        )
    return {name: parts[file][name] for name, file in files.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file of tensors; empty without any.

    Raises:
        CheckpointError: if the file is missing, or violates the format.
    """
    found = _read_header(path)[0].get("__metadata__", {})
    if not isinstance(found, dict):
        raise _broken_error(path, f"its __metadata__ is {reprlib.repr(found)}")
    return found


def _read_header(path: Path) -> tuple[dict, np.ndarray]:
    data = map_bytes(path)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > len(data) - 8:
        raise _broken_error(
            path, f"its header should have {length} bytes, and {max(0, len(data) - 8)} exist"
        )
    return _parse_header(path, data[8 : 8 + length]), data[8 + length :]


def _read_file(path: Path) -> dict[str, np.ndarray]:
    header, data = _read_header(path)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = {name: _tensor(path, name, entry, data) for name, entry in entries.items()}
    _check_overlaps(path, {name: entries[name]["data_offsets"] for name in found})
    return found


def _check_overlaps(path: Path, spans: Mapping[str, list[int]]) -> None:
    """Raise CheckpointError if two tensors share a byte: a small file could pose as any size."""
    end, previous = 0, ""
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first < min(end, last):
            raise _broken_error(path, f"{name} at {first} to {last} overlaps {previous}")
        end, previous = max((end, previous), (last, name))


def _tensor(path: Path, name: str, entry: Any, data: np.ndarray) -> np.ndarray:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _broken_error(path, f"its header has {reprlib.repr(entry)} for {name}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has the dtype {dtype}; supported are {', '.join(DTYPES)}. Convert "
            f"the file to one of them."
        )
    numpy_dtype = np.dtype(DTYPES[dtype])
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    is_span = type(first) is int and type(last) is int and 0 <= first <= last <= len(data)
    if not (is_shape and is_span) or last - first != math.prod(shape) * numpy_dtype.itemsize:
        raise _broken_error(path, f"{name} does not fit at {first} to {last} of {len(data)} bytes")
    try:
        return data[first:last].view(numpy_dtype).reshape(shape)
    except (ValueError, OverflowError):  # [0, 2**63 - 1], and more dims than numpy has
        raise _broken_error(path, f"{name} has the shape {reprlib.repr(shape)}") from None


def _parse_header(path: Path, text: np.ndarray, key: str = "") -> dict:
    try:
        if len(text) > HEADER:
            raise ValueError(f"a header of {len(text):,} bytes; use files of at most {HEADER:,}")
        found = parse_json(text.tobytes())
        return dict(found[key] if key else found)
    except (ValueError, KeyError, TypeError) as error:
        raise _broken_error(path, f"{type(error).__name__}: {error}") from None


def _broken_error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a complete file of tensors: {what}. Download or write it again."
    )


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray] | Mapping[str, jax.ShapeDtypeStruct],
    about: Mapping[str, str],
    read: Callable[[str], np.ndarray] | None = None,
) -> int:
    """Write the tensors to a file atomically, in their order, and return its size in bytes.

    Args:
        tensors: the arrays, or their shapes and dtypes.
        read: returns the array of a name, called when its turn comes, so that one is held at a
            time; None: `tensors` has the arrays.

    Raises:
        CheckpointError: if the file cannot be written, or the format has no such dtype.
    """
    if path.suffix != SUFFIX:
        raise CheckpointError(
            f"{path} is not a file of tensors: its name ends in {path.suffix or 'nothing'}. "
            f"Name it {path.with_suffix(SUFFIX)}"
        )
    text, size = _encode_header(tensors, about)
    arrays = (tensors[name] if read is None else read(name) for name in tensors)
    parts = (_bytes_of(array, like) for array, like in zip(arrays, tensors.values(), strict=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, itertools.chain([len(text).to_bytes(8, "little") + text], parts))
    except OSError as error:
        advice = disk_advice(error, path.parent)
        words = "Make room, or choose another path" if advice.room else advice.words
        raise CheckpointError(f"{path} cannot be written ({error.strerror}). {words}.") from None
    return 8 + len(text) + size


def _encode_header(tensors: Mapping[str, Any], about: Mapping[str, str]) -> tuple[bytes, int]:
    header: dict[str, object] = {"__metadata__": dict(about)}
    offset = 0
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is {array.dtype}, which the safetensors format does not have; the format "
                f"has {', '.join(map(str, _NAMES))}. Cast the leaf, or leave it out."
            )
        span = [offset, offset := offset + math.prod(array.shape) * array.dtype.itemsize]
        kind = _NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8), offset


def _bytes_of(array: Any, like: Any) -> bytes | memoryview:
    array = np.require(array, requirements="C")
    assert (array.shape, array.dtype) == (like.shape, like.dtype), "arrays are as in the header"
    return array.reshape(-1).view(np.uint8).data if array.size else b""
