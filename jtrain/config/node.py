"""A config as it was written: values, each with where it was said."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jtrain.errors import ConfigError

# Who wins over whom: a base has the layer of what inherits it less one.
DEFAULTS, FILE, TYPED = -1_000_000, 0, 1
PRESET = DEFAULTS + 1
SHOWN = 200  # characters of what was typed that a message repeats

Plain: TypeAlias = Any  # what JSON has: dict, list, text, numbers, true, false, null
Keys: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class SourceLocation:
    """Where a value was said. `str` of it is for a table, `place` opens a mistake."""

    layer: int
    file: str = ""
    line: int = 0
    setting: str = ""  # `a.b=value`, as it was typed; of a preset the name

    def __str__(self) -> str:
        if self.layer == DEFAULTS:
            return "default"
        if self.layer == PRESET:
            return f"preset {self.setting}"
        where = f"{self.file}:{self.line}" if self.layer <= FILE else "command line"
        return f"base {where}" if self.layer < FILE else where

    def place(self, key: str) -> str:
        """`toy.yaml:3: optimizer.lr`, or `command line: optimizer.lr=-1`."""
        if self.layer == DEFAULTS:
            return f"default: {key}"
        if self.layer == PRESET:
            return f"preset {self.setting}: {key}"
        if self.layer == TYPED:
            said, typed = self.setting.partition("=")[0], self.setting
            typed = typed if len(typed) <= SHOWN else f"{typed[:SHOWN]}..."
            return f"command line: {typed}" + (f": {key}" if key not in {"", said} else "")
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {key}" if key else where


DEFAULT = SourceLocation(DEFAULTS)


@dataclass(frozen=True)
class Node:
    """A value, where it was said, and the node that it took the place of."""

    value: Any  # a scalar, dict[str, Node] or list[Node]
    origin: SourceLocation
    under: "Node | None" = None


def plain(node: Node) -> Plain:
    """The values alone."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def nodes(value: Plain, origin: SourceLocation) -> Node:
    """Plain values as nodes that were all said in one place."""
    if isinstance(value, dict):
        return Node({key: nodes(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list):
        return Node([nodes(child, origin) for child in value], origin)
    return Node(value, origin)


def merge(below: Node, above: Node) -> Node:
    """`above` laid over `below`: mappings key by key, anything else replaced."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return Node(above.value, above.origin, under=below)
    both = dict(below.value)
    for key, child in above.value.items():
        both[key] = merge(both[key], child) if key in both else child
    return Node(both, above.origin)


def at(node: Node, keys: Iterable[str | int]) -> Node:
    """The node at `keys`, or the last on the way there."""
    for key in keys:
        try:
            node = node.value[key]
        except (KeyError, IndexError, TypeError):
            break
    return node


def said(node: Node, keys: Iterable[str | int]) -> Node | None:
    """The node at `keys`; None if nobody said it."""
    for key in keys:
        try:
            node = node.value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def dotted(keys: Iterable[str | int]) -> str:
    """`optimizer.lr`."""
    return ".".join(map(str, keys))


class Mistake(NamedTuple):
    """What is wrong at a key; in the order of layers, files and lines."""

    origin: SourceLocation
    key: str
    words: str

    def __str__(self) -> str:
        return f"{self.origin.place(self.key)}: {self.words}"


def mistake(root: Node, keys: Keys, words: str) -> Mistake:
    """A mistake at `keys`: where it was said, or where the nearest above it was."""
    return Mistake(at(root, keys).origin, dotted(keys), words)


def stop(wrong: Iterable[Mistake]) -> None:
    """Raises one ConfigError that tells each mistake once, if there are any."""
    lines = list(dict.fromkeys(map(str, sorted(wrong))))
    if lines:
        raise ConfigError("\n".join(lines))
