"""Checkpoint export: one file of named tensors in the safetensors format, for other programs.

tensors.py describes the format. It is written without the safetensors library, which takes bfloat16
only from torch.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jtrain.checkpoint.tensors import DTYPES, SUFFIX
from jtrain.errors import CheckpointError
from jtrain.io.atomic_write import create_private, private_files
from jtrain.io.disk_errors import disk_advice

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def exported_names(leaves: Mapping[str, str], everything: bool) -> dict[str, str]:
    """Return the stored name of each exported leaf by its exported name: dots for slashes.

    Args:
        leaves: the leaves of the checkpoint.
        everything: include the optimizer and the keys; otherwise only parameters and extra/.
    """
    if everything:
        return {name.replace("/", "."): name for name in leaves}
    prefix = "params/"
    params = {name.removeprefix(prefix): name for name in leaves if name.startswith(prefix)}
    extra = {name: name for name in leaves if name.startswith("extra/")}
    return {exported.replace("/", "."): name for exported, name in {**params, **extra}.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]
) -> int:
    """Write the tensors to a file atomically, and return its size in bytes.

    Raises:
        CheckpointError: if the file cannot be written, or the format has no such dtype.
    """
    if path.suffix != SUFFIX:
        raise CheckpointError(
            f"--out {path} is no file of tensors: its name ends in {path.suffix or 'nothing'}. "
            f"Write --out {path.with_suffix(SUFFIX)}"
        )
    header: dict[str, object] = {"__metadata__": dict(about)}
    offset, contiguous = 0, {}
    for name, array in sorted(tensors.items()):
        if array.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is {array.dtype}, which the safetensors format does not have; the format "
                f"has {', '.join(map(str, _NAMES))}. Cast the leaf, or export without --all."
            )
        contiguous[name] = np.require(array, requirements="C")
        span = [offset, offset := offset + array.nbytes]
        kind = _NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with private_files():  # as private as the run
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = create_private(unfinished)
        with opened as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in contiguous.values():
                file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a file is in place of the folder
            unfinished.unlink(missing_ok=True)
        advice = disk_advice(error, path.parent)
        words = "Make room, or choose another path" if advice.room else advice.words
        raise CheckpointError(
            f"--out {path} cannot be written ({error.strerror}). {words}."
        ) from None
    return 8 + len(text) + offset
