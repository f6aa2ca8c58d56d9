"""Files named by a path, a pattern or a list of them; plain, or compressed by gzip."""

import difflib
import glob
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from jtrain.data.sources.remote_files import check_address, fetch_files
from jtrain.errors import DataError
from jtrain.io.object_store import is_address
from jtrain.io.regular_files import file_kind, open_regular


def find_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files named by `paths`; the files of a pattern in the order of their names.

    An address in an object store, such as `s3://bucket/train/*.txt`, gives copies on this machine.

    Raises:
        DataError: a path that does not exist, a folder, a pattern that matches no file, or a file
            that is not readable.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise DataError("A list of files is empty. Name at least one: path=data/train.txt.")
    files = [file for path in paths for file in _files(str(path))]
    for file in files:
        _check_readable(file)
    return files


def _check_readable(file: Path) -> None:
    try:
        open_regular(file).close()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}). Make it readable: chmod u+r {file}"
        ) from None


def _files(path: str) -> list[Path]:
    if is_address(path):
        return fetch_files(path)
    if Path(path).is_file():
        return [Path(path)]
    check_address(path)
    if matches := sorted(Path(match) for match in glob.glob(path, recursive=True)):
        if files := [match for match in matches if match.is_file()]:
            return files
        if all(match.is_dir() for match in matches):
            raise DataError(f"{path} is a folder. Name its files: path={path.rstrip('/')}/*.")
        kind = file_kind(matches[0].lstat().st_mode)
        raise DataError(f"{path} is {kind}, and data is read from files: set path= to a file.")
    base = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
    raise DataError(f"{path}: no such file{base}. {_advice(Path(path))}")


def _advice(path: Path) -> str:
    """Return advice: a similar name, or the content of the folder."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if similar := difflib.get_close_matches(path.name, names, n=1):
        return f"Did you mean path={folder / similar[0]}?"
    if not folder.is_dir():
        return f"There is no folder {folder} either: set path= to an existing file."
    found = ", ".join(sorted(names)[:5]) or "nothing"
    return f"{str(folder).rstrip('/')}/ holds {found}: set path= to a file."


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
