"""Files as streams of bytes, plain or compressed by gzip; errors name the byte."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular

BLOCK = 1 << 18  # bytes unpacked at once


@contextmanager
def open_decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file as a stream of bytes, decompressed if it is named `.gz`.

    Raises:
        DataError: within the block, a `.gz` file that is damaged, cut off or not compressed.
    """
    if path.suffix != ".gz":
        with _opened(path) as plain:
            yield cast(io.BufferedIOBase, plain)
        return
    with _opened(path) as packed, gzip.GzipFile(fileobj=packed) as stream:
        try:
            yield stream
        except EOFError as error:
            raise DataError(
                f"{path} is packed by gzip and should end with its checksum; it ends within its "
                f"data, at byte {packed.seek(0, io.SEEK_END)}. It was cut off: get it again."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path} should be packed by gzip, and its data up to byte {packed.tell()} cannot "
                f"be unpacked ({error}). Get it again; if it is not packed, take .gz off its name."
            ) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}). Name another file, or make it readable: "
            f"chmod u+r {path}"
        ) from None


def read_into(stream: io.BufferedIOBase, into: memoryview) -> int:
    """Read into `into`; return the number of bytes, which is smaller only at the end."""
    count_read = 0
    while count_read < len(into) and (count := stream.readinto(into[count_read:][:BLOCK])):
        count_read += count
    return count_read
