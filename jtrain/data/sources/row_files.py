"""Rows in files of a user, read and written: .npz, .npy, .csv or .jsonl."""

import csv
import io
import itertools
import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.sources.content import HEAD, read_content
from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular


def check_rows(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Any], who: str
) -> dict[str, np.ndarray]:
    """Return the wanted arrays, each of the wanted type; drop the others.

    Args:
        arrays: n ... by name.
        wanted: the shape and the dtype of a row of each array.

    Raises:
        DataError: if one is missing, of another shape, or its numbers do not fit the type.
    """
    checked = {}
    for name, row in wanted.items():
        if name not in arrays:
            found = ", ".join(arrays) or "nothing"
            raise DataError(
                f"{who} takes {describe(wanted)}, and {name} is missing: found {found}. Rename the "
                f"intended array to {name}."
            )
        checked[name] = _cast(
            name, _check_shape(name, arrays[name], row.shape, who), row.dtype, who
        )
    return checked


def describe(wanted: Mapping[str, Any]) -> str:
    """Return the arrays of rows as text: `image float32[n, 8, 8], label int32[n]`."""
    types = {
        name: f"{np.dtype(row.dtype)}[{', '.join(map(str, ('n', *row.shape)))}]"
        for name, row in wanted.items()
    }
    return ", ".join(f"{name} {type_}" for name, type_ in types.items()) or "nothing"


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...], who: str) -> np.ndarray:
    if array.ndim and array.shape[1:] == shape:
        return array
    n = len(array) if array.ndim > len(shape) else 1
    expected = ", ".join(map(str, ("n", *shape)))
    advice = f"{name}.reshape({', '.join(map(str, (-1, *shape)))})"
    if array.shape == shape:
        advice = f"{name}[None] for a single row"
    elif array.size != n * int(np.prod(shape)):
        advice = f"an array of n rows, each {list(shape)}"
    raise DataError(
        f"{who} takes {name} of shape [{expected}], and it is {list(array.shape)}: give {advice}"
    )


def _cast(name: str, array: np.ndarray, dtype: Any, who: str) -> np.ndarray:
    dtype = np.dtype(dtype)
    problem = f"{who} takes {name} as {dtype}, and it is {array.dtype}"
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise DataError(f"{problem}: give numbers")
    if dtype.kind == "f" and array.dtype.kind in "iu" and array.dtype.itemsize == 1:
        raise DataError(
            f"{problem}, bytes: training scaled them. Scale them in the same way, and give "
            f"{name}.astype({dtype.name!r})"
        )
    if dtype.kind == "f" or (dtype.kind == "b") == (array.dtype.kind == "b"):
        cast = array.astype(dtype)
        if dtype.kind == "f" or np.array_equal(cast, array):
            return cast
    raise DataError(
        f"{problem}: give whole numbers that fit {dtype}, {name}.astype({dtype.name!r})"
    )


SUFFIXES = (".npz", ".npy", ".csv", ".jsonl")
_BROKEN = (ValueError, EOFError, zipfile.BadZipFile, AttributeError, KeyError, MemoryError)


def read_rows(
    path: Path, wanted: Mapping[str, Any], *, header: bool | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, n ... each.

    A .npz file has arrays by name, a .npy file the only wanted array. A line of .jsonl is an object
    with a list or a number for each name; for a single wanted array it may be that list or number
    itself. A .csv file has a column NAME, or columns NAME.0, NAME.1 and so on for rows that are
    arrays; for a single wanted array it may have as many columns of any name as the row has
    numbers, and needs no header.

    Args:
        wanted: the shape and the dtype of a row of each array.
        header: whether the first line of a .csv file is a header; None: decided by its content.

    Raises:
        DataError: if the file does not exist, is of another kind, or holds no such rows.
    """
    check_kind(path, "read from")
    try:
        if path.suffix in (".npz", ".npy"):
            return _numpy(path, wanted)
        with open_regular(path) as stream:
            encoding = read_content(path, stream.read(HEAD)).encoding
        encoding = "utf-8-sig" if encoding == "utf-8" else "utf-16"
        with io.TextIOWrapper(open_regular(path), encoding=encoding, newline="") as file:
            if path.suffix == ".csv":
                return _csv(path, file, wanted, header)
            return _jsonl(path, file, wanted)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): give the path of a file."
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: save it as UTF-8, or give a .npz.") from None


def _numpy(path: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    try:
        with open_regular(path) as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {_only_name(path, wanted): found}
            return {name: found[name] for name in found.files}
    except _BROKEN as error:
        why = "it holds Python objects, which may run code, or is another file"
        raise DataError(
            f"{path} cannot be read: {why if 'pickle' in str(error) else error}. Write it by "
            f"np.savez(file, name=array) or np.save(file, array), with numbers only."
        ) from None


def _only_name(path: Path, wanted: Mapping[str, Any]) -> str:
    """Return the name of the only wanted array."""
    if len(wanted) == 1:
        return next(iter(wanted))
    raise DataError(
        f"{path} has an array without a name, and {describe(wanted)} are wanted: give a .npz with "
        f"arrays of these names."
    )


def _jsonl(path: Path, lines: Iterable[str], wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rows: dict[str, list[Any]] = {name: [] for name in wanted}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(
                f"{path}:{number}: {line[:60].strip()!r} is not JSON: write an object a line, "
                f"{_example(wanted)}"
            ) from None
        row = row if isinstance(row, dict) else {_only_name(path, wanted): row}
        for name in wanted:
            if name not in row:
                raise DataError(
                    f"{path}:{number}: {name} is missing; found {', '.join(row) or 'nothing'}: "
                    f"write {_example(wanted)}"
                )
            rows[name].append(_array(f"{path}:{number}", name, row[name], wanted[name]))
    return _stack(path, rows)


def _array(where: str, name: str, value: Any, row: Any) -> np.ndarray:
    """Return a value of JSON as an array of the row's shape."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" or array.shape != row.shape:
        raise DataError(
            f"{where}: {name} is {array.dtype} of shape {list(array.shape)}, and numbers of shape "
            f"{list(row.shape)} are wanted: write {_example({name: row})}"
        )
    return array


def _example(wanted: Mapping[str, Any]) -> str:
    values = {
        name: f"{'[' * len(row.shape)}0, ...{']' * len(row.shape)}" if row.shape else "0"
        for name, row in wanted.items()
    }
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


def _csv(
    path: Path, file: Iterable[str], wanted: Mapping[str, Any], named: bool | None
) -> dict[str, np.ndarray]:
    try:
        lines = [(n, line) for n, line in enumerate(csv.reader(file), 1) if line]
    except csv.Error as error:
        raise DataError(f"{path} is not CSV ({error}): write numbers with commas.") from None
    if not lines:
        return _stack(path, {name: [] for name in wanted})
    header = [cell.strip() for cell in lines[0][1]]
    if named is None:
        columns = (c for name, row in wanted.items() for c in _columns(name, row.shape))
        named = set(columns) <= set(header) or _is_header(path, [line for _, line in lines[:100]])
    if named and (twice := [name for name, n in Counter(header).items() if name and n > 1]):
        raise DataError(f"{path}:1: two columns are named {twice[0]}: give each a name of its own.")
    places = _places(path, header if named else None, len(header), wanted)
    rows: dict[str, list[Any]] = {name: [] for name in wanted}
    for number, line in lines[1:] if named else lines:
        if len(line) != len(header):
            raise DataError(
                f"{path}:{number}: {len(line)} values, and the first line has {len(header)}: give "
                f"each line the same number."
            )
        for name, columns in places.items():
            cells = [_cell(path, number, line[c], c, header if named else None) for c in columns]
            rows[name].append(np.asarray(cells).reshape(wanted[name].shape))
    return _stack(path, rows)


def _is_header(path: Path, lines: Sequence[Sequence[str]]) -> bool:
    """Return whether the first line, without the wanted names, is a header and not a row.

    Raises:
        DataError: if it may be either.
    """
    cells = [cell.strip() for cell in lines[0]]
    texts = [cell for cell in cells if _number(cell) is None]
    if 0 < len(texts) < len(cells):
        raise DataError(
            f"{path}:1: {texts[0]!r} stands beside numbers, so the line is neither a header nor a "
            f"row: write a number there, or a name for each column; if it is a header: --header yes"
        )
    if texts or len(set(cells)) < max(len(cells), 2) or len(lines) == 1:
        return bool(texts)
    if not _rises(lines[0]) or np.mean([_rises(line) for line in lines[1:]]) >= 0.5:
        return False
    raise DataError(
        f"{path}:1: {', '.join(cells[:2])} ... {cells[-1]} may be a row, or the names of the "
        f"columns, such as years: --header no, or --header yes"
    )


def _rises(line: Sequence[str]) -> bool:
    """Return whether a line is whole numbers that rise, as years or 0, 1, 2 do."""
    whole = [x for x in map(_number, line) if isinstance(x, int)]
    return len(whole) == len(line) and all(a < b for a, b in itertools.pairwise(whole))


def _places(
    path: Path, header: Sequence[str] | None, count: int, wanted: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return the columns of each wanted array."""
    places: dict[str, list[int]] = {}
    missing = []
    for name, row in wanted.items():
        columns = _columns(name, row.shape)
        absent = [column for column in columns if column not in (header or ())]
        missing += absent
        places[name] = [] if absent or header is None else [header.index(c) for c in columns]
    if not missing:
        return places
    if len(wanted) == 1 and [math.prod(row.shape) for row in wanted.values()] == [count]:
        return {name: list(range(count)) for name in wanted}
    names = f"{missing[0]} ... {missing[-1]}" if len(missing) > 2 else ", ".join(missing)
    found = f"{count} columns without names" if header is None else ", ".join(header[:8])
    raise DataError(
        f"{path} lacks {names}, and has {found}: {describe(wanted)} is wanted. Name the "
        f"columns so in the first line."
    )


def _columns(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the columns of an array: NAME, or NAME.0, NAME.1 and so on, flat."""
    return [f"{name}.{i}" for i in range(math.prod(shape))] if shape else [name]


def _cell(
    path: Path, line: int, text: str, place: int, header: Sequence[str] | None
) -> int | float:
    value = _number(text)
    if value is not None:
        return value
    column = header[place] if header else f"column {place + 1}"
    raise DataError(f"{path}:{line}: {column} is {text!r}, no number: write one.")


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _stack(path: Path, rows: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    if not all(rows.values()):
        raise DataError(f"{path} has no rows: give at least one.")
    return {name: np.stack(arrays) for name, arrays in rows.items()}


def check_kind(path: Path, verb: str = "written to") -> None:
    """Raise DataError unless a file of this name can have rows."""
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path} ends with {path.suffix or 'nothing'}, and rows are {verb} "
            f"{', '.join(SUFFIXES)}: give one of these, such as {path.with_suffix('.npz')}"
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
