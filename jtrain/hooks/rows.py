"""A file of rows, one JSON object a line, that any kill leaves in order.

A row is one write of one whole line, so a process that is killed leaves at most the last one torn.
What the disk does not take waits for the next row, and `sync` says that it could not be written.
Floats are written by `repr`: equal bits, equal text. JSON has no NaN; `"NaN"`, `"Infinity"` and
`"-Infinity"` stand for what is not finite (Python's `float` and JavaScript's `Number` read them).
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.hooks.rewrite import rewrite


class Rows:
    """Appends rows to a file; every row has a `step`.

    Opening it mends it: a torn last row goes, and so do the rows past `resumed_at`, the step of the
    checkpoint that the run goes on from (they will be written again), or all rows if it is None.
    Those that `lasts` stay all the same.

    Raises:
        CheckpointError: if a row that is not the last cannot be read.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resumed_at: int | None = None,
        lasts: Callable[[Mapping[str, Any]], bool] | None = None,
    ):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend(self.path, resumed_at, lasts)
        self._file = self.path.open("ab", buffering=0)
        self._left = bytearray()  # that the disk has not taken

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a row, if there is room; a process that is killed right after has written it."""
        plain = {name: _plain(value) for name, value in row.items()}
        self._left += json.dumps(plain, allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """Forces all rows to the disk: then a power cut cannot take them either.

        Raises:
            OSError: if they cannot be written; they are kept for the next time.
        """
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()

    def _write(self) -> None:
        while self._left:
            del self._left[: self._file.write(self._left)]


def read(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a file, in order, also while it is written; none if there is no file.

    Raises:
        CheckpointError: if a row that is not the last cannot be read.
    """
    path = Path(path)
    return [_numbers(row) for row, _ in _parse(path)] if path.exists() else []


def whole(path: Path) -> list[dict[str, Any]]:
    """The rows as they were written, what is no number too; raises what `read` raises."""
    return [row for row, _ in _parse(path)]


def _mend(
    path: Path, resumed_at: int | None, lasts: Callable[[Mapping[str, Any]], bool] | None
) -> None:
    found = path.read_bytes() if path.exists() else b""
    kept = b""
    if resumed_at is not None or lasts is not None:
        stays = lambda row: lasts is not None and lasts(row)
        upto = -1 if resumed_at is None else resumed_at
        kept = b"".join(line for row, line in _parse(path) if row["step"] <= upto or stays(row))
    if kept != found:
        rewrite(path, kept)


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """The whole rows of a file, each with its line; what was torn at its end is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = [_row(line) for line in lines]
    while rows and rows[-1] is None:
        rows.pop()
    whole = []
    for number, (row, line) in enumerate(zip(rows, lines, strict=False), 1):
        if row is None:
            raise CheckpointError(
                f"row {number} of {path} cannot be read, and it is not the last: {line[:60]!r}. "
                f"Mend it by hand, or remove it: sed -i {number}d {path}"
            )
        whole.append((row, line))
    return whole


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if isinstance(value, str) else value
