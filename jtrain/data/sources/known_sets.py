"""Where the files of a known set lie: sets that are not in this package, and what gets them."""

import importlib.util
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jtrain.errors import DataError


class DataPackage(NamedTuple):
    """A package that brings the files of a set."""

    folder: str
    """Where it lays them, below its root: `usr/share/datasets/fashion-mnist`."""
    root: Path | None
    """The folder that it is installed below; None where it is not installed."""
    commands: tuple[str, ...]
    """What gets it, any one of them; `{data}` stands for the folder of this user's sets."""


def find_set(name: str, files: Sequence[str], package: DataPackage) -> list[Path]:
    """The paths of a set's `files`, each plain or with `.gz`, all of one folder.

    Looked through in this order: `$JTRAIN_DATA/name`, the user's cache `~/.cache/jtrain/data/name`
    (`$XDG_CACHE_HOME` is heeded), what was unpacked in either, and where the package lays them.

    Raises:
        DataError: if no place has all of the files; it names the places and the commands.
    """
    seen = [] if os.environ.get("JTRAIN_DATA") else ["$JTRAIN_DATA, which is not set"]
    for place in _places(name, package):
        paths = {file: _plain_or_packed(place / file) for file in files}
        there = [path for path in paths.values() if path]
        if len(there) == len(files):
            return there
        lacks = ", ".join(file for file, path in paths.items() if not path)
        seen.append(f"{place}, which lacks {lacks}" if there else str(place))
    data = shlex.quote(str(cache()))
    raise DataError(
        f"The set {name} was asked for ({', '.join(files)}; plain or .gz), and no place has all of "
        f"it. Looked through were{_lines(seen)}\n"
        f"Get it by one of{_lines(c.format(data=data) for c in package.commands)}\n"
        f"or lay the files in {cache() / name}."
    )


def cache() -> Path:
    """The folder of this user's data sets, be it there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jtrain" / "data"


def debian(package: str, folder: str) -> DataPackage:
    """A Debian package that lays a set in `folder`, installed or only unpacked."""
    unpack = f"mkdir -p {{data}} && dpkg-deb -x {package}_*.deb {{data}}"
    commands = (f"apt-get install {package}", f"apt-get download {package} && {unpack}")
    return DataPackage(folder.strip("/"), Path("/"), commands)


def python_package(package: str, module: str, folder: str) -> DataPackage:
    """A package of Python that lays a set in `folder` of its `module`, which is not imported."""
    spec = importlib.util.find_spec(module)
    where = spec.submodule_search_locations if spec else None
    root = Path(next(iter(where))).parent if where else None
    return DataPackage(f"{module}/{folder}", root, (f"pip install {package}",))


def _places(name: str, package: DataPackage) -> list[Path]:
    """The folders that may hold a set."""
    chosen = os.environ.get("JTRAIN_DATA")
    own = [Path(root).expanduser() for root in (chosen, cache()) if root]
    unpacked = [*own, package.root] if package.root else own
    places = [*(root / name for root in own), *(root / package.folder for root in unpacked)]
    return list(dict.fromkeys(places))  # a set of the web has one folder by both names


def _plain_or_packed(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _lines(words: Iterable[str]) -> str:
    return "".join(f"\n  {word}" for word in words)
