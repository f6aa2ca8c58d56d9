"""Files as streams of bytes, plain or packed by gzip, with what is wrong told by its place."""

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
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, unpacked where it is named `.gz`.

    Raises:
        DataError: within the block, a packed file that is damaged, cut off or not packed at all.
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
                f"{path} is packed by gzip and was to end with its checksum; it ends within its "
                f"data, at byte {packed.seek(0, io.SEEK_END)}. It was cut off: get it again."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path} was to be packed by gzip, and up to byte {packed.tell()} is what cannot "
                f"be unpacked ({error}). Get it again; if it is not packed, take .gz off its name."
            ) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise DataError(
            f"{path} was to be read, and cannot be ({error.strerror}). Name another file, or make "
            f"it readable: chmod u+r {path}"
        ) from None


def filled(stream: io.BufferedIOBase, into: memoryview) -> int:
    """How many bytes of `into` the stream filled: fewer than all only where it ends."""
    done = 0
    while done < len(into) and (count := stream.readinto(into[done:][:BLOCK])):
        done += count
    return done
