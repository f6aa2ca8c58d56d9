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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

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
    check_address(path)
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
_MANGLED = re.compile(r"[a-z][a-z0-9+]*:/[^/]")


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


def check_address(path: str) -> None:
    """Raise DataError for an address that was turned into a Path, which removes a slash."""
    if _MANGLED.match(path) and not Path(path).exists():
        scheme, _, rest = path.partition(":/")
        raise DataError(
            f"{path} is a Path, which cannot be an address of an object store. Give a string: "
            f"'{scheme}://{rest}'"
        )


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


class DataPackage(NamedTuple):
    """A package that installs the files of a set."""

    folder: str
    """The folder of the files, below the root: `usr/share/datasets/fashion-mnist`."""
    root: Path | None
    """The folder below which the package is installed; None if it is not installed."""
    commands: tuple[str, ...]
    """Alternative commands to install it; `{data}` stands for the user's folder of data sets."""


def find_set(name: str, files: Sequence[str], package: DataPackage) -> list[Path]:
    """Return the paths of a set's `files`, each plain or with `.gz`, all in one folder.

    The order of search is `$JTRAIN_DATA/name`, the user's cache `~/.cache/jtrain/data/name`
    (or below `$XDG_CACHE_HOME`), a package unpacked in either, and the installed package.

    Raises:
        DataError: if no folder has all of the files; the message has the folders and the commands.
    """
    searched = [] if os.environ.get("JTRAIN_DATA") else ["$JTRAIN_DATA, which is not set"]
    for place in _folders(name, package):
        paths = {file: plain_or_packed(place / file) for file in files}
        existing = [path for path in paths.values() if path]
        if len(existing) == len(files):
            return existing
        missing = ", ".join(file for file, path in paths.items() if not path)
        searched.append(f"{place}, which lacks {missing}" if existing else str(place))
    data = shlex.quote(str(cache_dir()))
    raise DataError(
        f"The set {name} was requested ({', '.join(files)}; plain or .gz), and no folder has all "
        f"of it. The search covered{_listed(searched)}\n"
        f"Get it by one of{_listed(c.format(data=data) for c in package.commands)}\n"
        f"or put the files into {cache_dir() / name}."
    )


def debian_package(package: str, folder: str) -> DataPackage:
    """Return the Debian package of a set in `folder`, installed or only unpacked."""
    unpack = f"mkdir -p {{data}} && dpkg-deb -x {package}_*.deb {{data}}"
    commands = (f"apt-get install {package}", f"apt-get download {package} && {unpack}")
    return DataPackage(folder.strip("/"), Path("/"), commands)


def python_package(package: str, module: str, folder: str) -> DataPackage:
    """Return the Python package of a set in `folder` of its `module`, which is not imported."""
    spec = importlib.util.find_spec(module)
    locations = spec.submodule_search_locations if spec else None
    root = Path(next(iter(locations))).parent if locations else None
    return DataPackage(f"{module}/{folder}", root, (f"pip install {package}",))


def _folders(name: str, package: DataPackage) -> list[Path]:
    """Return the folders that may hold a set."""
    chosen = os.environ.get("JTRAIN_DATA")
    user_roots = [Path(root).expanduser() for root in (chosen, cache_dir()) if root]
    unpacked = [*user_roots, package.root] if package.root else user_roots
    places = [*(root / name for root in user_roots), *(root / package.folder for root in unpacked)]
    return list(dict.fromkeys(places))  # a downloaded set has one folder by both names


def plain_or_packed(path: Path) -> Path | None:
    """Return the file, plain or with `.gz`; None if there is neither."""
    packed = path.with_name(path.name + ".gz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _listed(words: Iterable[str]) -> str:
    return "".join(f"\n  {word}" for word in words)
