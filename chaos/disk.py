"""Simulated disk after a power cut: a random subset of the recorded operations survives."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

_DROPPED = (0.1, 0.5, 0.9)  # shares of the operations without sync that are lost
_TORN, _ZEROED = 0.15, 0.1  # shares of the surviving writes


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that shim.c recorded."""

    what: str
    inode: int
    """Inode of the file or folder; for a mark, its number."""
    at: int
    data: bytes
    path: str
    other: str


def recorded(log: Path, root: Path) -> Iterator[Operation]:
    """Yield the operations in a log, with paths relative to `root`, from `/` on."""
    with log.open("rb") as file:
        for line in file:
            what, inode, at, size, *paths = line.decode().rstrip("\n").split("\t")
            first, second = (path.removeprefix(str(root.resolve())) for path in paths)
            yield Operation(what, int(inode), int(at), file.read(int(size)), first, second)


@dataclasses.dataclass
class _Node:
    """A file or a folder: its changes, durable or not."""

    folder: bool
    changes: list["_Change"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Change:
    """A write, a truncation or changed entries; both halves of a rename survive together."""

    kind: str
    at: int = 0
    data: bytes = b""
    names: dict[str, _Node | None] = dataclasses.field(default_factory=dict)
    durable: bool = False
    applied: bool = True
    other: "_Change | None" = None


class Disk:
    """State of a disk after some operations; without `draw` nothing is lost."""

    def __init__(self, log: Sequence[Operation], draw: random.Random | None):
        runs = _Node(folder=True)  # existed before
        self._root = _Node(True, [_Change("names", names={"runs": runs}, durable=True)])
        self._live = {"": self._root, "/runs": runs}  # the state that the program saw
        for operation in log:
            if operation.what != "mark":
                getattr(self, f"_{operation.what}")(operation)
        self.dropped = 0
        """Number of lost operations."""
        if draw is not None:
            self._lose(draw)

    def write(self, folder: Path) -> None:
        """Write the files to a folder."""
        _write(self._root, folder)

    def _create(self, op: Operation) -> None:
        self._enter(op.path, _Node(folder=False))

    def _mkdir(self, op: Operation) -> None:
        self._enter(op.path, _Node(folder=True))

    def _write(self, op: Operation) -> None:
        self._live[op.path].changes.append(_Change("write", op.at, op.data))

    def _cut(self, op: Operation) -> None:
        self._live[op.path].changes.append(_Change("cut", op.at))

    def _sync(self, op: Operation) -> None:
        for change in self._live[op.path].changes:
            change.durable = True
            if change.other:
                change.other.durable = True

    def _remove(self, op: Operation) -> None:
        self._enter(op.path, None)
        del self._live[op.path]

    def _rename(self, op: Operation) -> None:
        moved = {path: node for path, node in self._live.items() if _below(path, op.path)}
        node = self._live[op.path]
        for path in [path for path in self._live if _below(path, op.other)]:
            del self._live[path]
        for path, each in moved.items():
            del self._live[path]
            self._live[op.other + path.removeprefix(op.path)] = each
        (before, name), (after, new) = _split(op.path), _split(op.other)
        if before == after:
            self._live[before].changes.append(_Change("names", names={name: None, new: node}))
            return
        removed, added = _Change("names", names={name: None}), _Change("names", names={new: node})
        removed.other, added.other = added, removed
        self._live[before].changes.append(removed)
        self._live[after].changes.append(added)

    def _enter(self, path: str, node: _Node | None) -> None:
        folder, name = _split(path)
        self._live[folder].changes.append(_Change("names", names={name: node}))
        if node is not None:
            self._live[path] = node

    def _lose(self, draw: random.Random) -> None:
        share = draw.choice(_DROPPED)
        for change in _all_changes(self._root, {}):
            if change.durable or (change.other and not change.other.applied):
                continue
            change.applied = draw.random() >= share
            if change.other:
                change.other.applied = change.applied
            if change.applied and change.kind == "write" and change.data:
                if draw.random() < _TORN:
                    change.data = change.data[: draw.randrange(len(change.data))]
                elif draw.random() < _ZEROED:
                    change.data = bytes(len(change.data))
            self.dropped += not change.applied


def _all_changes(node: _Node, visited: dict[int, _Node]) -> Iterator[_Change]:
    if id(node) in visited:
        return
    visited[id(node)] = node
    for change in node.changes:
        yield change
        for each in change.names.values():
            if each is not None:
                yield from _all_changes(each, visited)


def _write(node: _Node, path: Path) -> None:
    if not node.folder:
        path.write_bytes(_content(node))
        return
    path.mkdir(parents=True, exist_ok=True)
    names: dict[str, _Node | None] = {}
    for change in node.changes:
        if change.applied:
            names |= change.names
    for name, each in names.items():
        if each is not None:
            _write(each, path / name)


def _content(node: _Node) -> bytes:
    data = bytearray()
    for change in node.changes:
        if not change.applied:
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
