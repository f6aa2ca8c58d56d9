"""Rows written to a file: .npz, .npy, .csv or .jsonl."""

import csv
import io
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.sources.read_rows import SUFFIXES
from jtrain.errors import DataError


def check_kind(path: Path) -> None:
    """Raise DataError unless rows can be written to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path} ends with {path.suffix or 'nothing'}, and rows are written to "
            f"{', '.join(SUFFIXES)}: write {path.with_suffix('.npz')}"
        )


def encode_rows(path: Path, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a file of these arrays, n ... each, in the format of its suffix.

    Raises:
        DataError: if several arrays are given for a .npy.
    """
    check_kind(path)
    file = io.BytesIO()
    if path.suffix == ".npz":
        with zipfile.ZipFile(file, "w") as archive:  # np.savez takes no array named `file`
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return file.getvalue()
    if path.suffix == ".npy":
        if len(arrays) > 1:
            raise DataError(
                f"{path} can hold one array, and the arrays are {', '.join(arrays)}: write "
                f"{path.with_suffix('.npz')}"
            )
        np.save(file, next(iter(arrays.values())), allow_pickle=False)
        return file.getvalue()
    return (_csv_text(arrays) if path.suffix == ".csv" else _jsonl_text(arrays)).encode()


def _csv_text(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a table with a column for each number of a row: NAME, or NAME.0, NAME.1 and so on."""
    header, columns = [], []
    for name, array in arrays.items():
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        header += [name] if array.ndim == 1 else [f"{name}.{i}" for i in range(flat.shape[1])]
        columns.append(flat.astype(np.int64) if array.dtype.kind == "b" else flat)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in zip(*columns, strict=True):
        # str() gives the shortest digits that read back as the same float32.
        writer.writerow([str(value) for part in row for value in part])
    return text.getvalue()


def _jsonl_text(arrays: Mapping[str, np.ndarray]) -> str:
    count = len(next(iter(arrays.values())))
    rows = ({name: _plain(array[i]) for name, array in arrays.items()} for i in range(count))
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _plain(value: Any) -> Any:
    """Return lists of numbers, with "NaN" and "Infinity" in place of numbers that JSON lacks."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if value.dtype.kind != "f":
        return value.item()
    number = float(str(value))  # the fewest digits that identify a float32
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
