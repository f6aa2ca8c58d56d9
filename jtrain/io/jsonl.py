"""JSON Lines files: one JSON object a row, which stay in order after any kill.

A row is one write of one complete line, so a killed process leaves at most the last row torn.
Floats are written by `repr`: equal bits, equal text. JSON has no NaN; `"NaN"`, `"Infinity"` and
`"-Infinity"` stand for nonfinite values (Python's `float` and JavaScript's `Number` read them).
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice, patiently
from jtrain.io.regular_files import (
    TooLargeError,
    atomic_write,
    open_regular,
    parse_json,
    read_bytes,
)

MOST = 1 << 33  # bytes in a file of rows


class JsonlWriter:
    """Writer that appends rows to a file; every row has a `step`.

    Opening the file drops a torn last row and the rows after `resumed_at`, the step of the
    checkpoint that the run resumes from (the run writes them again), or all rows if `resumed_at` is
    None. Rows that `retain` selects stay.

    Args:
        resumed_at: a step; None restarts the file.

    Raises:
        CheckpointError: if a row before the last cannot be read, or the file cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resumed_at: int | None = None,
        retain: Callable[[Mapping[str, Any]], bool] | None = None,
    ):
        self.path = Path(path)
        self._pending = bytearray()  # bytes that the disk has refused so far
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _repair(self.path, resumed_at, retain)
            self._file = open_regular(self.path, "ab", buffering=0)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is for the rows of a run, and cannot be written "
                f"({error.strerror}). {disk_advice(error, self.path).words}."
            ) from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; a process killed right afterwards has written it.

        A row that the disk refuses is written with the next one, so that a disk that is full for a
        moment ends no run; `sync` raises.
        """
        plain = {name: to_json(value) for name, value in row.items()}
        self._pending += json.dumps(plain, allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """Flush all rows to the disk, so that they survive a power cut.

        Raises:
            OSError: if rows cannot be written.
        """
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()

    def _write(self) -> None:
        while self._pending:
            del self._pending[: self._file.write(self._pending)]


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a file in order, also while it is written; none if there is no file.

    Raises:
        CheckpointError: if a row that is not the last cannot be read.
    """
    path = Path(path)
    rows = [row for row, _ in _parse(path, _content(path))]
    try:
        return [_numbers(row) for row in rows]
    except ValueError as error:
        raise CheckpointError(f"{path} has text in place of a number: {error}") from None


def complete_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows as written, nonfinite numbers as text; raise what `read_rows` raises."""
    return [row for row, _ in _parse(path, _content(path))]


def _repair(
    path: Path, resumed_at: int | None, retain: Callable[[Mapping[str, Any]], bool] | None
) -> None:
    content, saved = _content(path), b""
    if resumed_at is not None or retain is not None:
        last = -1 if resumed_at is None else resumed_at
        stays = lambda row: row["step"] <= last or (retain and retain(row))
        saved = b"".join(line for row, line in _parse(path, content) if stays(row))
    if saved != content:
        atomic_write(path, saved)


def _parse(path: Path, content: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Return the complete rows in the content of a file, each with its line, without a torn end."""
    lines = content.splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    while rows and rows[-1] is None:
        rows.pop()
    complete = []
    for number, (row, line) in enumerate(zip(rows, lines, strict=False), 1):
        if row is None:
            raise CheckpointError(
                f"row {number} of {path} cannot be read, and more rows follow: {line[:60]!r}. "
                f"Fix the row by hand, or remove it: sed -i {number}d {path}"
            )
        complete.append((row, line))
    return complete


def _content(path: Path) -> bytes:
    try:
        return patiently(read_bytes)(path, most=MOST, inside=path.parent)
    except FileNotFoundError:
        return b""
    except (OSError, TooLargeError) as error:
        words = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{path} holds rows of a run, and {words}. Fix the file, or move it away and lose "
            f"its rows: mv {path} {path}.old"
        ) from None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    is_complete = (
        line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    )
    return row if is_complete else None


def to_json(value: Any) -> Any:
    """Return values as JSON has them: lists for arrays, texts for numbers that are not finite."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if isinstance(value, str) else value
