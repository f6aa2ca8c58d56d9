"""Config nodes: values as they were written, each with its source."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jtrain.errors import ConfigError

# A higher layer replaces a lower one; a base is one layer below the file that inherits it.
DEFAULTS, FILE, TYPED = -1_000_000, 0, 1
PRESET = DEFAULTS + 1
SHOWN = 200  # typed characters that a message repeats

Plain: TypeAlias = Any  # what JSON has: dict, list, text, numbers, true, false, null
Keys: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class SourceLocation:
    """Source of a value. `str` is for a table, `place` begins an error message."""

    layer: int
    file: str = ""
    line: int = 0
    setting: str = ""  # `a.b=value` as typed, or `preset gpt2`

    def __str__(self) -> str:
        if self.layer == DEFAULTS:
            return "default"
        if self.layer == PRESET:
            return self.setting
        where = f"{self.file}:{self.line}" if self.layer <= FILE else "command line"
        return f"base {where}" if self.layer < FILE else where

    def place(self, key: str) -> str:
        """Return `toy.yaml:3: optimizer.lr`, or `command line: optimizer.lr=-1`."""
        if self.layer == DEFAULTS:
            return f"default: {key}"
        if self.layer == PRESET:
            return f"{self.setting}: {key}"
        if self.layer == TYPED:
            setting_key, typed = self.setting.partition("=")[0], self.setting
            typed = typed if len(typed) <= SHOWN else f"{typed[:SHOWN]}..."
            return f"command line: {typed}" + (f": {key}" if key not in {"", setting_key} else "")
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {key}" if key else where


DEFAULT = SourceLocation(DEFAULTS)


@dataclass(frozen=True)
class Node:
    """A value, its source, and the node that it replaced."""

    value: Any  # a scalar, dict[str, Node] or list[Node]
    origin: SourceLocation
    under: "Node | None" = None
    text: str = ""
    """A scalar as it was written."""


def without_origins(node: Node) -> Plain:
    """Return the values without their sources."""
    if isinstance(node.value, dict):
        return {key: without_origins(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [without_origins(child) for child in node.value]
    return node.value


def make_nodes(value: Plain, origin: SourceLocation) -> Node:
    """Return plain values as nodes that share one source."""
    if isinstance(value, dict):
        return Node({key: make_nodes(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list):
        return Node([make_nodes(child, origin) for child in value], origin)
    return Node(value, origin)


def merge(below: Node, above: Node) -> Node:
    """Merge `above` over `below`: mappings key by key, anything else is replaced."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return Node(above.value, above.origin, below, above.text)
    both = dict(below.value)
    for key, child in above.value.items():
        both[key] = merge(both[key], child) if key in both else child
    return Node(both, above.origin)


def nearest_node(node: Node, keys: Iterable[str | int]) -> Node:
    """Return the node at `keys`, or its last existing parent."""
    for key in keys:
        try:
            node = node.value[key]
        except (KeyError, IndexError, TypeError):
            break
    return node


def find_node(node: Node, keys: Iterable[str | int]) -> Node | None:
    """Return the node at `keys`; None if no layer has it."""
    for key in keys:
        try:
            node = node.value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def dotted(keys: Iterable[str | int]) -> str:
    """Join keys to a dotted key: `optimizer.lr`."""
    return ".".join(map(str, keys))


class InvalidKey(NamedTuple):
    """Validation error at a key; sorted by layer, file and line."""

    origin: SourceLocation
    key: str
    words: str

    def __str__(self) -> str:
        return f"{self.origin.place(self.key)}: {self.words}"


def invalid_key_at(root: Node, keys: Keys, words: str) -> InvalidKey:
    """Return an error at `keys`, with the source of the nearest existing node."""
    return InvalidKey(nearest_node(root, keys).origin, dotted(keys), words)


def raise_invalid(wrong: Iterable[InvalidKey], why: Iterable[str] = ()) -> None:
    """Raise one ConfigError with each error once, if there are any, and `why` below them."""
    lines = list(dict.fromkeys(map(str, sorted(wrong))))
    if lines:
        raise ConfigError("\n".join([*lines, *why]))
