"""Rows into a file that others read: .npz, .npy, .csv or .jsonl."""

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.sources.read_rows import KINDS
from jtrain.errors import DataError


def check_kind(path: Path) -> None:
    """Check that rows can be written to a file of this name.

    Raises:
        DataError: if not.
    """
    if path.suffix not in KINDS:
        raise DataError(
            f"{path} ends with {path.suffix or 'nothing'}, and rows are written to "
            f"{', '.join(KINDS)}: write {path.with_suffix('.npz')}"
        )


def encode_rows(path: Path, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a file of these arrays, n ... each, of the kind that its name says.

    Raises:
        DataError: if a .npy is to hold several.
    """
    check_kind(path)
    file = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(file, allow_pickle=False, **arrays)
        return file.getvalue()
    if path.suffix == ".npy":
        if len(arrays) > 1:
            raise DataError(
                f"{path} holds one array, and there are {', '.join(arrays)}: write "
                f"{path.with_suffix('.npz')}"
            )
        np.save(file, next(iter(arrays.values())), allow_pickle=False)
        return file.getvalue()
    return (_csv(arrays) if path.suffix == ".csv" else _jsonl(arrays)).encode()


def _csv(arrays: Mapping[str, np.ndarray]) -> str:
    """A column for each number of a row: NAME, or NAME.0, NAME.1 and so on, flat."""
    header, columns = [], []
    for name, array in arrays.items():
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        header += [name] if array.ndim == 1 else [f"{name}.{i}" for i in range(flat.shape[1])]
        columns.append(flat.astype(np.int64) if array.dtype.kind == "b" else flat)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in zip(*columns, strict=True):
        writer.writerow([str(value) for part in row for value in part])  # float32: as few digits
    return text.getvalue()


def _jsonl(arrays: Mapping[str, np.ndarray]) -> str:
    count = len(next(iter(arrays.values())))
    row = lambda i: {name: _plain(array[i]) for name, array in arrays.items()}
    return "".join(json.dumps(row(i), allow_nan=False) + "\n" for i in range(count))


def _plain(value: Any) -> Any:
    """Lists of numbers; JSON has none that are not finite, "NaN" and "Infinity" stand for them."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if value.dtype.kind != "f":
        return value.item()
    number = float(str(value))  # as few digits as tell float32 apart
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
