"""Known data sets that are not in this package: their folders, and commands that install them."""

import importlib.util
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jtrain.errors import DataError
from jtrain.io.user_cache import user_cache_dir


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
    for place in _places(name, package):
        paths = {file: _plain_or_packed(place / file) for file in files}
        existing = [path for path in paths.values() if path]
        if len(existing) == len(files):
            return existing
        missing = ", ".join(file for file, path in paths.items() if not path)
        searched.append(f"{place}, which lacks {missing}" if existing else str(place))
    data = shlex.quote(str(cache_dir()))
    raise DataError(
        f"The set {name} was requested ({', '.join(files)}; plain or .gz), and no folder has all "
        f"of it. The search covered{_lines(searched)}\n"
        f"Get it by one of{_lines(c.format(data=data) for c in package.commands)}\n"
        f"or put the files into {cache_dir() / name}."
    )


def cache_dir() -> Path:
    """Return the folder of this user's data sets, which may not exist."""
    return user_cache_dir() / "jtrain" / "data"


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


def _places(name: str, package: DataPackage) -> list[Path]:
    """Return the folders that may hold a set."""
    chosen = os.environ.get("JTRAIN_DATA")
    user_roots = [Path(root).expanduser() for root in (chosen, cache_dir()) if root]
    unpacked = [*user_roots, package.root] if package.root else user_roots
    places = [*(root / name for root in user_roots), *(root / package.folder for root in unpacked)]
    return list(dict.fromkeys(places))  # a downloaded set has one folder by both names


def _plain_or_packed(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _lines(words: Iterable[str]) -> str:
    return "".join(f"\n  {word}" for word in words)
