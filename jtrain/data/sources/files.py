"""Files named by a path, a pattern, an address or the name of a set; plain, or packed by gzip."""

import glob
import gzip
import hashlib
import importlib.util
import io
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from jtrain.errors import DataError
from jtrain.errors.spelling import nearest_name
from jtrain.io.environment import user_cache_dir
from jtrain.io.object_store import ObjectStore, ObjectStoreError, is_address
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
        _opened(file).close()
    return files


def _files(path: str) -> list[Path]:
    if is_address(path):
        return fetch_files(path)
    if Path(path).is_file():
        return [Path(path)]
    if matches := sorted(Path(match) for match in glob.glob(path, recursive=True)):
        if files := [match for match in matches if match.is_file()]:
            return files
        raise DataError(
            f"{path} is {file_kind(matches[0].lstat().st_mode)}, and data is read from files: set "
            f"path= to a file, or to those of a folder: path={path.rstrip('/')}/*"
        )
    base = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
    raise DataError(f"{path}: no such file{base}. {_advice(Path(path))}")


def _advice(path: Path) -> str:
    """Return advice: a similar name, or the content of the folder."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if similar := nearest_name(path.name, names):
        return f"Did you mean path={folder / similar}?"
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
            f"{path} cannot be read ({error.strerror}). Make it readable: chmod u+r {path}"
        ) from None


def read_into(stream: io.BufferedIOBase, into: memoryview) -> int:
    """Read into `into`; return the number of bytes, which is smaller only at the end."""
    count_read = 0
    while count_read < len(into) and (count := stream.readinto(into[count_read:][:BLOCK])):
        count_read += count
    return count_read


_PATTERN = re.compile(r"[*?\[]")


def fetch_files(address: str) -> list[Path]:
    """Return copies of the objects that an address names, such as `s3://bucket/train/*.txt`.

    The copies are in the user's cache of data sets; an object is fetched again only if its version
    has changed.

    Raises:
        DataError: if there is no such object, or the store cannot be read.
    """
    folder, _, rest = address.rpartition("/")
    while _PATTERN.search(folder):
        folder, _, more = folder.rpartition("/")
        rest = f"{more}/{rest}"
    try:
        objects = ObjectStore(folder)
        is_pattern = _PATTERN.search(rest)
        names = objects.matches(rest) if is_pattern else [rest] * objects.exists(rest)
        if not names:
            found = ", ".join(list(objects.sizes())[:5])
            raise DataError(
                f"{address}: no such object. {folder}/ holds {found or 'nothing'}: set path= to "
                f"one of them, or to a pattern ({folder}/*)."
            )
        return [_fetch(objects, name) for name in names]
    except ObjectStoreError as error:
        raise DataError(f"{error}") from None


def fetch_folder(address: str) -> Path:
    """Return a folder with copies of all objects below an address, cached as by `fetch_files`.

    Raises:
        DataError: see `fetch_files`.
    """
    try:
        objects = ObjectStore(address)
        names = list(objects.sizes())
        versions = "\n".join(f"{name} {objects.version(name)}" for name in names)
        if not names:
            raise DataError(f"{address} has no objects below it. Set path= to a folder with some.")
        folder = _place(address, versions)
        for name in names:
            if ".." in name.split("/"):
                raise DataError(
                    f"{address} holds {name!r}, which is not a name of a file below it."
                )
            _fetch_to(objects, name, folder / name)
        return folder
    except ObjectStoreError as error:
        raise DataError(f"{error}") from None


def _fetch(objects: ObjectStore, name: str) -> Path:
    folder = _place(f"{objects.address}/{name}", objects.version(name))
    return _fetch_to(objects, name, folder / name.rpartition("/")[2])


def _fetch_to(objects: ObjectStore, name: str, file: Path) -> Path:
    if file.exists():
        return file
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        objects.fetch(name, part)
        part.replace(file)  # the file is complete or does not exist
    except OSError as error:
        raise DataError(
            f"{objects.address}/{name} cannot be copied to {file} ({error.strerror}). Make room "
            f"there, or set XDG_CACHE_HOME to another disk."
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return file


def _place(address: str, version: str) -> Path:
    parts = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (address, version))
    return cache_dir().joinpath("objects", *parts)


def cache_dir() -> Path:
    """Return the folder of this user's data sets, which may not exist."""
    return Path(user_cache_dir(), "jtrain", "data")


def find_set(name: str, files: Sequence[str], installed: Path | None, command: str) -> list[Path]:
    """Return the paths of a set's `files`, each plain or with `.gz`, all in one folder.

    The order of search is `$JTRAIN_DATA/name`, the user's cache `~/.cache/jtrain/data/name`
    (or below `$XDG_CACHE_HOME`), and the folder where a package installs the set.

    Args:
        command: what installs the set; `{data}` stands for the user's folder of data sets.

    Raises:
        DataError: if no folder has all of the files; the message has the folders and the command.
    """
    chosen, searched = os.environ.get("JTRAIN_DATA"), list[str]()
    roots = [Path(chosen).expanduser()] if chosen else []
    for place in [*(root / name for root in [*roots, cache_dir()]), *filter(None, [installed])]:
        paths = {file: plain_or_packed(place / file) for file in files}
        existing = [path for path in paths.values() if path]
        if len(existing) == len(files):
            return existing
        missing = ", ".join(file for file, path in paths.items() if not path)
        searched.append(f"{place}, which lacks {missing}" if existing else str(place))
    listed, command = "\n  ".join(searched), command.format(data=shlex.quote(str(cache_dir())))
    raise DataError(
        f"The set {name} was requested ({', '.join(files)}; plain or .gz), and none of these "
        f"folders has all of it:\n  {listed}\nGet it: {command}\n"
        f"or put the files into {cache_dir() / name}, or into a folder that $JTRAIN_DATA has."
    )


def package_folder(module: str, folder: str) -> Path | None:
    """Return a folder of an installed Python package, which is not imported."""
    spec = importlib.util.find_spec(module)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations)), folder) if locations else None


def plain_or_packed(path: Path) -> Path | None:
    """Return the file, plain or with `.gz`; None if there is neither."""
    packed = path.with_name(path.name + ".gz")
    return next((file for file in (path, packed) if file.is_file()), None)
