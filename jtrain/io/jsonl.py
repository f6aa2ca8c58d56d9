"""JSON Lines files: one JSON object a row, which stay in order after any kill.

A row is one write of one complete line, so a killed process leaves at most the last row torn.
Bytes that the disk refuses wait for the next row, and `sync` raises if they cannot be written.
Changes by other processes are reported at the next row, and repaired as far as possible.
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

import xxhash

from jtrain.errors import CheckpointError
from jtrain.io.atomic_write import atomic_write
from jtrain.io.disk_errors import disk_advice
from jtrain.io.lost_files import OpenFolder, file_identity
from jtrain.io.regular_files import TooLargeError, open_regular, parse_json, read_bytes
from jtrain.io.transient import patiently

MOST = 1 << 33  # bytes in a file of rows


class JsonlWriter:
    """Writer that appends rows to a file; every row has a `step`.

    Opening the file repairs it: a torn last row is removed, and so are the rows after `resumed_at`,
    the step of the checkpoint that the run resumes from (the run writes them again), or all rows if
    `resumed_at` is None. Rows that `retain` selects stay.

    Args:
        path: the file.
        resumed_at: a step; None restarts the file.
        retain: returns whether a row stays.
        lost: takes a line when another process removed, replaced or truncated the file: one line
            for each event. A removed file is written again with all of its rows; truncated rows are
            lost.

    Raises:
        CheckpointError: if a row before the last cannot be read, or the file cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resumed_at: int | None = None,
        retain: Callable[[Mapping[str, Any]], bool] | None = None,
        lost: Callable[[str], object] = lambda line: None,
    ):
        self.path = Path(path)
        self._pending = bytearray()  # bytes that are not on the disk yet
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = _repair(self.path, resumed_at, retain)
            self._file = self._open()
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is for the rows of a run, and cannot be written "
                f"({error.strerror}). {disk_advice(error, self.path).words}."
            ) from None
        self._folder, self._lost, self._folder_lost = OpenFolder(self.path.parent), lost, False
        self._size, self._digest = len(content), xxhash.xxh3_128(content)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row if there is room; a process killed right afterwards has written the row."""
        plain = {name: to_json(value) for name, value in row.items()}
        self._pending += json.dumps(plain, allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """Flush all rows to the disk, so that they survive a power cut.

        Raises:
            OSError: if rows cannot be written; the next call tries again.
        """
        self._write()
        os.fsync(self._file.fileno())

    def mark(self) -> dict[str, Any]:
        """Return the bytes written so far and their digest, for `find_truncation`; after `sync`."""
        return {"bytes": self._size, "xxh3": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        self._folder.close()

    def _write(self) -> None:
        self._check_file()
        while self._pending:
            count = self._file.write(self._pending)
            self._digest.update(bytes(self._pending[:count]))
            self._size += count
            del self._pending[:count]

    def _check_file(self) -> None:
        """Detect and report what another process did to the file since the last row."""
        if file_identity(self.path) != file_identity(self._file.fileno()):
            self._rewrite()
        elif (size := os.fstat(self._file.fileno()).st_size) != self._size:
            self._continue_from(size)

    def _rewrite(self) -> None:
        """Restore a removed file from the open descriptor, which still has all rows."""
        if not self._folder.is_in_place:  # rows follow their moved directory
            if not self._folder_lost:
                self._folder_lost = True
                self._lost(f"{self.path.parent} was moved or removed while the run wrote in it")
            return
        event = "another file replaced it" if file_identity(self.path) else "it was removed"
        content = os.pread(self._file.fileno(), self._size, 0)
        atomic_write(self.path, content)
        self._file.close()
        self._file = self._open()
        self._lost(f"{self.path}: {event} while the run wrote it. All rows were written again")
        if len(content) != self._size:
            self._continue_from(len(content))

    def _continue_from(self, size: int) -> None:
        """Continue after the complete rows of a file that another process truncated or extended."""
        content = os.pread(self._file.fileno(), size, 0)
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < size:
            # A row after a torn one would be torn too.
            os.ftruncate(self._file.fileno(), len(complete))
        if size < self._size:
            event = f"was truncated while the run wrote it. {_describe_rest(complete, self._size)}"
        else:
            event = f"was written by another process: it had {self._size} bytes, and has {size}"
        self._size, self._digest = len(complete), xxhash.xxh3_128(complete)
        self._lost(f"{self.path} {event}")

    def _open(self) -> Any:
        return open_regular(self.path, "a+b", buffering=0)


def find_truncation(path: Path, mark: Mapping[str, Any]) -> str:
    """Return what a file has lost since a `mark`; empty if nothing."""
    if not path.is_file():
        return f"{path} is missing: its {mark['bytes']} bytes are lost"
    content = _content(path)
    if len(content) < mark["bytes"]:
        return f"{path} was truncated. {_describe_rest(content, mark['bytes'])}"
    if xxhash.xxh3_128_hexdigest(content[: mark["bytes"]]) != mark["xxh3"]:
        return f"{path} was changed: its first {mark['bytes']} bytes differ from those written"
    return ""


def _describe_rest(content: bytes, size: int) -> str:
    """Describe what is left of `size` bytes."""
    rows = [row for line in content.splitlines(keepends=True) if (row := _row(line))]
    lost = f"the rows after step {rows[-1]['step']} are" if rows else "all rows are"
    return f"{len(content)} of {size} bytes are left: {lost} lost"


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a file in order, also while it is written; none if there is no file.

    Raises:
        CheckpointError: if a row that is not the last cannot be read.
    """
    path = Path(path)
    rows = [row for row, _ in _parse(path)]
    try:
        return [_numbers(row) for row in rows]
    except ValueError as error:
        raise CheckpointError(f"{path} has text in place of a number: {error}") from None


def complete_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows as written, nonfinite numbers as text; raise what `read_rows` raises."""
    return [row for row, _ in _parse(path)]


def _repair(
    path: Path, resumed_at: int | None, retain: Callable[[Mapping[str, Any]], bool] | None
) -> bytes:
    """Remove the rows that will be written again, and return the rest."""
    content = _content(path)
    saved = b""
    if resumed_at is not None or retain is not None:
        last = -1 if resumed_at is None else resumed_at
        rows = _parse(path)
        saved = b"".join(
            line for row, line in rows if row["step"] <= last or (retain and retain(row))
        )
    if saved != content:
        atomic_write(path, saved)
    return saved


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return the complete rows of a file, each with its line, without a torn end."""
    lines = _content(path).splitlines(keepends=True)
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
    """Return the bytes of a file of rows; none if there is no file."""
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
