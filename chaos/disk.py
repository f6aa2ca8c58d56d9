"""A disk that lost its power: which of the recorded operations are on it is drawn."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

_DROPPED = (0.1, 0.5, 0.9)  # shares of what is not durable that may be lost
_TORN, _ZEROED = 0.15, 0.1  # of the writes that are there


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of those that shim.c writes down."""

    what: str
    inode: int
    """Of the file or folder; of a mark, its number."""
    at: int
    data: bytes
    path: str
    other: str


def recorded(log: Path, root: Path) -> Iterator[Operation]:
    """The operations in a log, their paths in `root`, each `/` and more."""
    with log.open("rb") as file:
        for line in file:
            what, inode, at, size, *paths = line.decode().rstrip("\n").split("\t")
            first, second = (path.removeprefix(str(root.resolve())) for path in paths)
            yield Operation(what, int(inode), int(at), file.read(int(size)), first, second)


@dataclasses.dataclass
class _Node:
    """A file or a folder: what was done to it, whether that is durable, and its entries' names."""

    folder: bool
    changes: list["_Change"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Change:
    """A write, a cut or entries that came and went; `others` of a rename goes with it or not."""

    kind: str
    at: int = 0
    data: bytes = b""
    names: dict[str, _Node | None] = dataclasses.field(default_factory=dict)
    durable: bool = False
    there: bool = True
    other: "_Change | None" = None


class Disk:
    """What is left after some operations; with no `draw`, all of it."""

    def __init__(self, log: Sequence[Operation], draw: random.Random | None):
        runs = _Node(folder=True)  # was there before
        self._root = _Node(True, [_Change("names", names={"runs": runs}, durable=True)])
        self._live = {"": self._root, "/runs": runs}  # as those saw it who did it
        for operation in log:
            if operation.what != "mark":
                getattr(self, f"_{operation.what}")(operation)
        self.dropped = 0
        """Operations that are not on it."""
        if draw is not None:
            self._lose(draw)

    def write(self, place: Path) -> None:
        """Makes it real."""
        _write(self._root, place)

    def _create(self, of: Operation) -> None:
        self._enter(of.path, _Node(folder=False))

    def _mkdir(self, of: Operation) -> None:
        self._enter(of.path, _Node(folder=True))

    def _write(self, of: Operation) -> None:
        self._live[of.path].changes.append(_Change("write", of.at, of.data))

    def _cut(self, of: Operation) -> None:
        self._live[of.path].changes.append(_Change("cut", of.at))

    def _sync(self, of: Operation) -> None:
        for change in self._live[of.path].changes:
            change.durable = True
            if change.other:
                change.other.durable = True

    def _remove(self, of: Operation) -> None:
        self._enter(of.path, None)
        del self._live[of.path]

    def _rename(self, of: Operation) -> None:
        moved = {path: node for path, node in self._live.items() if _below(path, of.path)}
        node = self._live[of.path]
        for path in [path for path in self._live if _below(path, of.other)]:
            del self._live[path]
        for path, each in moved.items():
            del self._live[path]
            self._live[of.other + path.removeprefix(of.path)] = each
        (before, name), (after, new) = _split(of.path), _split(of.other)
        if before == after:
            self._live[before].changes.append(_Change("names", names={name: None, new: node}))
            return
        gone, come = _Change("names", names={name: None}), _Change("names", names={new: node})
        gone.other, come.other = come, gone
        self._live[before].changes.append(gone)
        self._live[after].changes.append(come)

    def _enter(self, path: str, node: _Node | None) -> None:
        folder, name = _split(path)
        self._live[folder].changes.append(_Change("names", names={name: node}))
        if node is not None:
            self._live[path] = node

    def _lose(self, draw: random.Random) -> None:
        share = draw.choice(_DROPPED)
        for change in _all_changes(self._root, {}):
            if change.durable or (change.other and not change.other.there):
                continue
            change.there = draw.random() >= share
            if change.other:
                change.other.there = change.there
            if change.there and change.kind == "write" and change.data:
                if draw.random() < _TORN:
                    change.data = change.data[: draw.randrange(len(change.data))]
                elif draw.random() < _ZEROED:
                    change.data = bytes(len(change.data))
            self.dropped += not change.there


def _all_changes(node: _Node, seen: dict[int, _Node]) -> Iterator[_Change]:
    if id(node) in seen:
        return
    seen[id(node)] = node
    for change in node.changes:
        yield change
        for each in change.names.values():
            if each is not None:
                yield from _all_changes(each, seen)


def _write(node: _Node, place: Path) -> None:
    if not node.folder:
        place.write_bytes(_content(node))
        return
    place.mkdir(parents=True, exist_ok=True)
    names: dict[str, _Node | None] = {}
    for change in node.changes:
        if change.there:
            names |= change.names
    for name, each in names.items():
        if each is not None:
            _write(each, place / name)


def _content(node: _Node) -> bytes:
    data = bytearray()
    for change in node.changes:
        if not change.there:
            continue
        if change.kind == "cut":
            data = data[: change.at] + bytes(max(0, change.at - len(data)))
            continue
        end = change.at + len(change.data)
        data += bytes(max(0, end - len(data)))
        data[change.at : end] = change.data
    return bytes(data)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
