"""Parameters as a file, as `jtrain export --to safetensors` writes it."""

import json
from pathlib import Path

import jax
import numpy as np


def load(path, params):
    """Return parameters from a file that `jtrain export RUN --to safetensors` wrote: the length of
    a header, the header, which has the place of each tensor, and the tensors."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    types = {"F32": np.float32, "BF16": jax.numpy.bfloat16}

    def read(place, leaf):
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        if name not in header or header[name]["shape"] != list(leaf.shape):
            raise SystemExit(f"{path}: {name} is to be {leaf.shape}, found {header.get(name)}")
        first, last = (start + offset for offset in header[name]["data_offsets"])
        numbers = np.frombuffer(data[first:last], types[header[name]["dtype"]])
        return numbers.reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(read, params)


def save(path, params):
    """Write parameters as such a file."""
    header, arrays, end = {}, [], 0
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf, np.float32)
        about = {"dtype": "F32", "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        header[jax.tree_util.keystr(place, simple=True, separator=".")] = about
        arrays, end = [*arrays, array.tobytes()], end + array.nbytes
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(arrays))
