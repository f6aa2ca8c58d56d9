"""Files named by a path, a pattern or a list of them."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

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
    return f"{folder}/ holds {', '.join(sorted(names)[:5]) or 'nothing'}: set path= to a file."
