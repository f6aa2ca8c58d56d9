"""Layers of a config: its bases, the file itself, and the settings of the command line."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from jtrain.config.explain import find_schemas
from jtrain.config.node import (
    FILE,
    TYPED,
    InvalidKey,
    Keys,
    Node,
    SourceLocation,
    dotted,
    find_node,
    merge,
)
from jtrain.config.read import parse, read
from jtrain.config.top import BaseConfig
from jtrain.config.wording import describe_allowed
from jtrain.errors import ConfigError


def merge_layers(path: Path, settings: Sequence[str]) -> tuple[Node, list[InvalidKey]]:
    """Merge the file over its bases and `a.b=value` over both; return the errors of all.

    Raises:
        ConfigError: if the file, or a config that it inherits from, cannot be read.
    """
    node, mistakes = _with_bases(path, FILE, ())
    for setting in settings:
        node, found = _set(node, setting)
        mistakes += found
    return node, mistakes


def _with_bases(path: Path, layer: int, above: tuple[Path, ...]) -> tuple[Node, list[InvalidKey]]:
    node, mistakes = read(path, layer)
    base = node.value.pop("base", None)
    if base is None:
        return node, mistakes
    chain, words = (*above, path.resolve()), ""
    below = path.parent / str(base.value)
    if not isinstance(base.value, str) or not base.value:
        words = "must be the name of a file, from this one's directory; write `base: other.yaml`"
    elif below.suffix not in {".yaml", ".yml"} or Path(str(base.value)).is_absolute():
        words = (
            f"must be a config (.yaml) by its place from this file's directory, found "
            f"{base.value!r}; write `base: other.yaml`"
        )
    elif below.is_symlink() or (below.exists() and not below.is_file()):
        what = "a link, and a base is named itself" if below.is_symlink() else "no file"
        words = f"{below} is {what}; write `base: other.yaml`"
    elif below.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, below))
        words = f"inherits from itself: {names}; delete one `base:`"
    else:
        try:
            inherited, found = _with_bases(below, layer - 1, chain)
            return merge(inherited, node), mistakes + found
        except ConfigError as error:
            words = str(error)
    raise ConfigError("\n".join(map(str, [*mistakes, InvalidKey(base.origin, "base", words)])))


def _set(root: Node, setting: str) -> tuple[Node, list[InvalidKey]]:
    """Return `root` with one `a.b=value` in it."""
    key, equals, text = setting.partition("=")
    keys, origin = tuple(key.split(".")), SourceLocation(TYPED, setting=setting)
    if not equals or not all(keys):
        words = "is not a setting; write KEY=VALUE, such as optimizer.lr=1e-3"
    elif keys[0] == "base":
        words = f"only a file can inherit; write `base: {text}` in it"
    elif not text.strip():
        words = f"has no value; write {_value_of(key)}"
    elif refused := _blocked(root, keys):
        words = refused
    else:
        try:
            value, mistakes = parse(text, lambda _: origin, keys)
            return _put(root, keys, value or Node(None, origin)), mistakes
        except ConfigError as error:
            found = str(error).removeprefix(f"{origin.place('')}: ")
            words = f"{found}; or quote it: {key}={shlex.quote(json.dumps(text))}"
    return root, [InvalidKey(origin, key, words)]


def _value_of(key: str) -> str:
    """Return how to type null or an empty text if it is allowed, and otherwise any value."""
    wants = find_schemas(BaseConfig, key)  # an experiment's own keys are not known yet
    types = {member.annotation for want in wants for member in want.members()}
    null = f"{key}=null for nothing" if type(None) in types else ""
    empty = f"{key}='\"\"' for empty text" if any(want.default == "" for want in wants) else ""
    allowed = f", {describe_allowed(wants[0])}" if wants else ""
    return " or ".join(filter(None, (null, empty))) or f"{key}=VALUE{allowed}"


def _blocked(root: Node, keys: Keys) -> str:
    """Return why `keys` can have no value: a key on the way is not a mapping."""
    for depth in range(1, len(keys)):
        node = find_node(root, keys[:depth])
        if node and not isinstance(node.value, dict):
            what = "is a list: say all of it" if isinstance(node.value, list) else "has no keys"
            return (
                f"{dotted(keys[:depth])} ({node.origin}) {what}; write {dotted(keys[:depth])}=VALUE"
            )
    return ""


def _put(parent: Node | None, keys: Keys, node: Node) -> Node:
    """Return `parent` with `node` at `keys` below it; missing mappings are created."""
    if not keys:
        return Node(node.value, node.origin, parent, node.text)
    parent = parent or Node({}, node.origin)
    child = _put(parent.value.get(keys[0]), keys[1:], node)
    return Node({**parent.value, keys[0]: child}, parent.origin, parent.under)
