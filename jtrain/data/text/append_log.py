"""Append-only files of numbers, which can be truncated to their last synced state."""

import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jtrain.errors import DataError
from jtrain.io.atomic_write import create_new, resolve_inside
from jtrain.io.regular_files import open_regular


class AppendLog:
    """Numbers in files of `size` each (None: one file), resumed from the last `sync`.

    Args:
        folder: the folder of the files.
        name: the pattern of the file names, `tokens-{:05}.bin`.
        dtype: the type of the numbers.
        size: numbers a file.
        known: the result of the last `sync`; everything written after it is cut off.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        size: int | None,
        known: list[dict[str, Any]] | None,
    ):
        self._folder, self._name, self._dtype, self._size = folder, name, dtype, size
        self._files = list(known or [])
        self.count = sum(file["count"] for file in self._files)
        """Numbers written, in all files."""
        self._stream = self._reopen()

    def append(self, numbers: np.ndarray) -> None:
        """Write more numbers, over as many files as they need."""
        while len(numbers):
            last = self._files[-1]
            room = len(numbers) if self._size is None else self._size - last["count"]
            if not room:
                self.sync()
                self.close()
                self._stream = self._next_file()
                continue
            data = numbers[:room].astype(self._dtype).tobytes()
            self._stream.write(data)
            last["count"] += len(data) // self._dtype.itemsize
            last["crc32"] = zlib.crc32(data, last["crc32"])
            self.count += len(data) // self._dtype.itemsize
            numbers = numbers[room:]

    def sync(self) -> list[dict[str, Any]]:
        """Flush to the disk; return each file's name, count and checksum."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return [dict(file) for file in self._files]

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _next_file(self) -> BinaryIO:
        name = self._name.format(len(self._files))
        self._files.append({"name": name, "count": 0, "crc32": 0})
        return (self._folder / name).open("wb")

    def _reopen(self) -> BinaryIO:
        """Reopen the last file at its synced length."""
        if not self._files:
            return self._next_file()
        name, wanted = self._files[-1]["name"], self._bytes(self._files[-1])
        path = resolve_inside(self._folder, name, DataError, self._folder / "progress.json")
        found = path.stat().st_size if path.exists() else 0
        if found < wanted:
            raise DataError(
                f"{path} was written up to byte {wanted} and ends at {found}: it was cut since. "
                f"Start again: rm -r {self._folder}"
            )
        try:
            stream = open_regular(path, "r+b")
        except OSError as error:
            raise DataError(
                f"{path} should be written further and cannot be ({error.strerror}). Start again: "
                f"rm -r {self._folder}"
            ) from None
        stream.truncate(wanted)
        stream.seek(wanted)
        return stream

    def _bytes(self, file: dict[str, Any]) -> int:
        return file["count"] * self._dtype.itemsize


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically and durably, whatever ends the process."""
    new = path.with_name(f"{path.name}.new")
    with create_new(new) as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
