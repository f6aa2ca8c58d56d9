"""A file of rows, one JSON object a line, that any kill leaves in order.

A row is one write of one whole line, so a process that is killed leaves at most the last one torn.
What the disk does not take waits for the next row, and `sync` says that it could not be written.
What others do to the file meanwhile is told at the next row, and mended as far as it can be.
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

import xxhash

from jtrain.errors import CheckpointError
from jtrain.io.atomic_write import atomic_write
from jtrain.io.disk_errors import disk_advice
from jtrain.io.regular_files import TooLargeError, open_regular, parse_json, read_bytes
from jtrain.io.same_file import HeldFolder, file_identity

MOST = 1 << 33  # bytes of a file of rows


class JsonlWriter:
    """Appends rows to a file; every row has a `step`.

    Opening it mends it: a torn last row goes, and so do the rows past `resumed_at`, the step of the
    checkpoint that the run goes on from (they will be written again), or all rows if it is None.
    Those that `lasts` stay all the same.

    Args:
        path: the file.
        resumed_at: a step; None begins anew.
        lasts: says of a row whether it stays.
        lost: takes a line when another process removed, replaced or cut the file: once for each
            time. A file that was removed is written again, with all of its rows; rows that were cut
            off are lost.

    Raises:
        CheckpointError: if a row that is not the last cannot be read, or the file not be written.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resumed_at: int | None = None,
        lasts: Callable[[Mapping[str, Any]], bool] | None = None,
        lost: Callable[[str], object] = lambda line: None,
    ):
        self.path = Path(path)
        self._left = bytearray()  # that the disk has not taken
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = _mend(self.path, resumed_at, lasts)
            self._file = self._open()
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is to take the rows of a run, and cannot be written "
                f"({error.strerror}). {disk_advice(error, self.path).words}."
            ) from None
        self._home, self._lost, self._away = HeldFolder(self.path.parent), lost, False
        self._size, self._digest = len(content), xxhash.xxh3_128(content)

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

    def mark(self) -> dict[str, Any]:
        """Return the bytes written so far and their digest, for `find_truncation`; after `sync`."""
        return {"bytes": self._size, "xxh3": self._digest.hexdigest()}

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        self._home.close()

    def _write(self) -> None:
        self._look_after()
        while self._left:
            count = self._file.write(self._left)
            self._digest.update(bytes(self._left[:count]))
            self._size += count
            del self._left[:count]

    def _look_after(self) -> None:
        """Tells what another process did to the file since the last row."""
        if file_identity(self.path) != file_identity(self._file.fileno()):
            self._write_again()
        elif (size := os.fstat(self._file.fileno()).st_size) != self._size:
            self._begin_from(size)

    def _write_again(self) -> None:
        """Puts all rows under the name of the file that was removed: they are in the open one."""
        if not self._home.is_there:  # the rows go where their folder went
            if not self._away:
                self._away = True
                self._lost(f"{self.path.parent} was moved or removed while the run wrote in it")
            return
        found = (
            "another file was put in its place" if file_identity(self.path) else "it was removed"
        )
        content = os.pread(self._file.fileno(), self._size, 0)
        atomic_write(self.path, content)
        self._file.close()
        self._file = self._open()
        self._lost(f"{self.path}: {found} while the run wrote it. All rows were written again")
        if len(content) != self._size:
            self._begin_from(len(content))

    def _begin_from(self, size: int) -> None:
        """Goes on after the whole rows of a file that was cut, or that another wrote in."""
        content = os.pread(self._file.fileno(), size, 0)
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < size:
            # A row after a torn one would be torn too.
            os.ftruncate(self._file.fileno(), len(complete))
        if size < self._size:
            what = f"was cut while the run wrote it. {_left(complete, self._size)}"
        else:
            what = f"was written by another: it had {self._size} bytes, and has {size}"
        self._size, self._digest = len(complete), xxhash.xxh3_128(complete)
        self._lost(f"{self.path} {what}")

    def _open(self) -> Any:
        return open_regular(self.path, "a+b", buffering=0)


def find_truncation(path: Path, mark: Mapping[str, Any]) -> str:
    """Return what of a file is not as it was at a `mark`; empty where all of that is there."""
    if not path.is_file():
        return f"{path} is gone: its {mark['bytes']} bytes are lost"
    content = _content(path)
    if len(content) < mark["bytes"]:
        return f"{path} was cut. {_left(content, mark['bytes'])}"
    if xxhash.xxh3_128_hexdigest(content[: mark["bytes"]]) != mark["xxh3"]:
        return (
            f"{path} was changed: its first {mark['bytes']} bytes are not those that were written"
        )
    return ""


def _left(content: bytes, size: int) -> str:
    """Says what is left of so many bytes."""
    rows = [row for line in content.splitlines(keepends=True) if (row := _row(line))]
    upto = f"the rows after step {rows[-1]['step']} are" if rows else "all rows are"
    return f"{len(content)} of {size} bytes are left: {upto} lost"


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a file, in order, also while it is written; none if there is no file.

    Raises:
        CheckpointError: if a row that is not the last cannot be read.
    """
    path = Path(path)
    rows = [row for row, _ in _parse(path)]
    try:
        return [_numbers(row) for row in rows]
    except ValueError as error:
        raise CheckpointError(f"{path} has a text where a number is written: {error}") from None


def complete_rows(path: Path) -> list[dict[str, Any]]:
    """The rows as they were written, what is no number too; raises what `read_rows` raises."""
    return [row for row, _ in _parse(path)]


def _mend(
    path: Path, resumed_at: int | None, lasts: Callable[[Mapping[str, Any]], bool] | None
) -> bytes:
    """Removes what is to be written again, and returns what stays."""
    found = _content(path)
    kept = b""
    if resumed_at is not None or lasts is not None:
        stays = lambda row: lasts is not None and lasts(row)
        upto = -1 if resumed_at is None else resumed_at
        kept = b"".join(line for row, line in _parse(path) if row["step"] <= upto or stays(row))
    if kept != found:
        atomic_write(path, kept)
    return kept


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """The whole rows of a file, each with its line; what was torn at its end is left out."""
    lines = _content(path).splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    while rows and rows[-1] is None:
        rows.pop()
    complete_rows = []
    for number, (row, line) in enumerate(zip(rows, lines, strict=False), 1):
        if row is None:
            raise CheckpointError(
                f"row {number} of {path} cannot be read, and it is not the last: {line[:60]!r}. "
                f"Mend it by hand, or remove it: sed -i {number}d {path}"
            )
        complete_rows.append((row, line))
    return complete_rows


def _content(path: Path) -> bytes:
    """The bytes of a file of rows; none if there is no file."""
    try:
        return read_bytes(path, most=MOST, inside=path.parent)
    except FileNotFoundError:
        return b""
    except (OSError, TooLargeError) as error:
        words = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{path} holds rows of a run, and {words}. Put it right, or move it away and lose "
            f"them: mv {path} {path}.old"
        ) from None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    complete_rows = (
        line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    )
    return row if complete_rows else None


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
