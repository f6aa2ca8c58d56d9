"""The files that a path, a pattern or a list of them names."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from jtrain.data.sources.remote_files import fetch_files, refuse_mangled
from jtrain.errors import DataError
from jtrain.io.object_store import is_address
from jtrain.io.regular_files import kind_of, open_regular


def found(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files behind `paths`, those of a pattern in the order of their names.

    Of an address of an object store, `s3://bucket/train/*.txt` say, copies on this machine.

    Raises:
        DataError: a path that is not there, a folder, a pattern that matches no file, or a file
            that may not be read.
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
            f"{file} was to be read, and cannot be ({error.strerror}). Make it readable: "
            f"chmod u+r {file}"
        ) from None


def _files(path: str) -> list[Path]:
    if is_address(path):
        return fetch_files(path)
    if Path(path).is_file():
        return [Path(path)]
    refuse_mangled(path)
    if matches := sorted(Path(match) for match in glob.glob(path, recursive=True)):
        if files := [match for match in matches if match.is_file()]:
            return files
        if all(match.is_dir() for match in matches):
            raise DataError(f"{path} is a folder. Name its files: path={path.rstrip('/')}/*.")
        kind = kind_of(matches[0].lstat().st_mode)
        raise DataError(f"{path} is {kind}, and data is read from files: set path= to a file.")
    seen = "" if Path(path).is_absolute() else f", seen from {Path.cwd()}"
    raise DataError(f"{path}: no such file{seen}. {_nearest(Path(path))}")


def _nearest(path: Path) -> str:
    """What to type instead."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"Did you mean path={folder / near[0]}?"
    if not folder.is_dir():
        return f"There is no folder {folder} either: set path= to a file that is there."
    return f"{folder}/ holds {', '.join(sorted(names)[:5]) or 'nothing'}: set path= to a file."
