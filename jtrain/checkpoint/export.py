"""A checkpoint as one file of named tensors in the safetensors format, which others read.

The format is described in tensors.py. It is written here as it is read there: its own library takes
bfloat16 only from torch.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jtrain.checkpoint.tensors import DTYPES, ENDING
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.private_files import create_private, private_files

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def names(leaves: Mapping[str, str], everything: bool) -> dict[str, str]:
    """Each leaf that is exported, by the name that it gets: dots for slashes.

    Args:
        leaves: of the checkpoint.
        everything: the optimizer and the keys too; else parameters, and extra/ beside them.
    """
    if everything:
        return {name.replace("/", "."): name for name in leaves}
    prefix = "params/"
    params = {name.removeprefix(prefix): name for name in leaves if name.startswith(prefix)}
    beside = {name: name for name in leaves if name.startswith("extra/")}
    return {called.replace("/", "."): name for called, name in {**params, **beside}.items()}


def write(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> int:
    """The bytes of the file that has these tensors; it is there whole or not at all.

    Raises:
        CheckpointError: if it cannot be written, or the format has no such numbers.
    """
    if path.suffix != ENDING:
        raise CheckpointError(
            f"--out {path} is no file of tensors: its name ends with {path.suffix or 'nothing'}. "
            f"Write --out {path.with_suffix(ENDING)}"
        )
    header: dict[str, object] = {"__metadata__": dict(about)}
    at, whole = 0, {}
    for name, array in sorted(tensors.items()):
        if array.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is of the type {array.dtype}, which a file of tensors does not have; it "
                f"has {', '.join(map(str, _NAMES))}. Cast it first, or export without --all."
            )
        whole[name] = np.require(array, requirements="C")
        place = [at, at := at + array.nbytes]
        kind = _NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with private_files():  # as the run is
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = create_private(unfinished)
        with opened as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in whole.values():
                file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a file in the place of its folder
            unfinished.unlink(missing_ok=True)
        todo = disk_advice(error, path.parent)
        words = "Make room, or name another place" if todo.room else todo.words
        raise CheckpointError(
            f"--out {path} cannot be written ({error.strerror}). {words}."
        ) from None
    return 8 + len(text) + at
