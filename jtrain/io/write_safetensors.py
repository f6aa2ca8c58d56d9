"""Files of named tensors in the safetensors format, written a tensor at a time.

safetensors.py describes the format. It is written without the safetensors library, which takes
bfloat16 only from torch.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.atomic_write import create_new
from jtrain.io.disk_errors import disk_advice
from jtrain.io.safetensors import DTYPES, SUFFIX

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray] | Mapping[str, jax.ShapeDtypeStruct],
    about: Mapping[str, str],
    read: Callable[[str], np.ndarray] | None = None,
) -> int:
    """Write the tensors to a file atomically, in their order, and return its size in bytes.

    Args:
        path: the file.
        tensors: the arrays, or their shapes and dtypes.
        about: texts for the header.
        read: returns the array of a name, called when its turn comes, so that one is held at a
            time; None: `tensors` has the arrays.

    Raises:
        CheckpointError: if the file cannot be written, or the format has no such dtype.
    """
    if path.suffix != SUFFIX:
        raise CheckpointError(
            f"{path} is no file of tensors: its name ends in {path.suffix or 'nothing'}. "
            f"Name it {path.with_suffix(SUFFIX)}"
        )
    text, size = _header(tensors, about)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_new(unfinished) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, like in tensors.items():
                _write(file, name, like, like if read is None else read(name))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a file is in place of the folder
            unfinished.unlink(missing_ok=True)
        advice = disk_advice(error, path.parent)
        words = "Make room, or choose another path" if advice.room else advice.words
        raise CheckpointError(f"{path} cannot be written ({error.strerror}). {words}.") from None
    return 8 + len(text) + size


def _header(tensors: Mapping[str, Any], about: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header, and the bytes of the tensors after it."""
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


def _write(file: BinaryIO, name: str, like: Any, array: Any) -> None:
    array = np.require(array, requirements="C")
    assert (array.shape, array.dtype) == (like.shape, like.dtype), f"{name} is as in the header"
    file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
