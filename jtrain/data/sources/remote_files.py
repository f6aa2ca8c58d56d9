"""Data in an object store, copied to this machine before it is read."""

import hashlib
import os
import re
from pathlib import Path

from jtrain.data.sources.known_sets import cache_dir
from jtrain.errors import DataError
from jtrain.io.object_store import ObjectStore, ObjectStoreError

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
                raise DataError(f"{address} holds {name!r}, which is no name of a file below it.")
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
