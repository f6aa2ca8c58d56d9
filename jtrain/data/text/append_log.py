"""Files that only grow, and that can be cut back to where they were known to be."""

import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jtrain.errors import DataError
from jtrain.io.private_files import create_private, resolve_inside
from jtrain.io.regular_files import open_regular


class AppendLog:
    """Numbers in files of `size` each (None: one file), from where a `sync` left them.

    Args:
        folder: where they lie.
        name: of the files, `tokens-{:05}.bin`.
        dtype: of the numbers.
        size: numbers a file.
        known: what the last `sync` gave; what was written since is cut off.
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
        self._stream = self._reopened()

    def append(self, numbers: np.ndarray) -> None:
        """Writes more numbers, over as many files as they need."""
        while len(numbers):
            last = self._files[-1]
            room = len(numbers) if self._size is None else self._size - last["count"]
            if not room:
                self.sync()
                self.close()
                self._stream = self._another()
                continue
            data = numbers[:room].astype(self._dtype).tobytes()
            self._stream.write(data)
            last["count"] += len(data) // self._dtype.itemsize
            last["crc32"] = zlib.crc32(data, last["crc32"])
            self.count += len(data) // self._dtype.itemsize
            numbers = numbers[room:]

    def sync(self) -> list[dict[str, Any]]:
        """Each file's name, count and checksum, once all of it is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return [dict(file) for file in self._files]

    def close(self) -> None:
        """Lets go of the file."""
        self._stream.close()

    def _another(self) -> BinaryIO:
        name = self._name.format(len(self._files))
        self._files.append({"name": name, "count": 0, "crc32": 0})
        return (self._folder / name).open("wb")

    def _reopened(self) -> BinaryIO:
        """The last file, behind what is known of it."""
        if not self._files:
            return self._another()
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
                f"{path} is to be written further, and cannot be ({error.strerror}). Start again: "
                f"rm -r {self._folder}"
            ) from None
        stream.truncate(wanted)
        stream.seek(wanted)
        return stream

    def _bytes(self, file: dict[str, Any]) -> int:
        return file["count"] * self._dtype.itemsize


def replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whatever ends the process."""
    new = path.with_name(f"{path.name}.new")
    with create_private(new) as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
