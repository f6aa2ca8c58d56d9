"""Lays a config over its bases, and what was typed over the config."""

from collections.abc import Sequence
from pathlib import Path

from jtrain.config.node import FILE, TYPED, Keys, Node, Origin, dotted, merge
from jtrain.config.read import parse, read
from jtrain.errors import ConfigError


def layers(path: Path, settings: Sequence[str]) -> tuple[Node, list[str]]:
    """The file over what it inherits, `a.b=value` over both, and the mistakes in any of them."""
    node, mistakes = _with_bases(path, FILE, ())
    for setting in settings:
        node, found = _set(node, setting)
        mistakes += found
    return node, mistakes


def _with_bases(path: Path, layer: int, above: tuple[Path, ...]) -> tuple[Node, list[str]]:
    node, mistakes = read(path, layer)
    base = node.value.pop("base", None)
    if base is None:
        return node, mistakes
    opening = base.origin.place("base")
    if not isinstance(base.value, str) or not base.value:
        said = f"{opening}: must be the name of a file beside this one; write `base: other.yaml`"
        return node, [*mistakes, said]
    below, chain = path.parent / base.value, (*above, path.resolve())
    if below.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, below))
        return node, [*mistakes, f"{opening}: inherits from itself: {names}; delete one `base:`"]
    try:
        inherited, found = _with_bases(below, layer - 1, chain)
    except ConfigError as error:
        return node, [*mistakes, f"{opening}: {error}"]
    return merge(inherited, node), mistakes + found


def _set(root: Node, setting: str) -> tuple[Node, list[str]]:
    """`root` with one `a.b=value` in it."""
    opening = f"command line: {setting}"
    key, equals, text = setting.partition("=")
    keys = tuple(key.split("."))
    if not equals or not all(keys):
        return root, [f"{opening}: is not a setting; write KEY=VALUE, such as optimizer.lr=1e-3"]
    if keys[0] == "base":
        return root, [f"{opening}: only a file can inherit; write `base: {text}` in it"]
    if not text.strip():
        nothing = f"{key}=null for nothing, {key}='\"\"' for empty text"
        return root, [f"{opening}: has no value; write {nothing}"]
    origin = Origin(TYPED, setting=setting)
    try:
        value, mistakes = parse(text, lambda _: origin, keys)
        return _put(root, keys, value or Node(None, origin)), mistakes
    except ConfigError as error:
        return root, [f"{opening}: {str(error).removeprefix(f'{opening}: ')}"]


def _put(parent: Node | None, keys: Keys, node: Node, done: Keys = ()) -> Node:
    """`parent` with `node` at `keys` below it; mappings on the way are made."""
    if not keys:
        return Node(node.value, node.origin, under=parent)
    if parent is None:
        parent = Node({}, node.origin)
    if not isinstance(parent.value, dict):
        name = dotted(done)
        what = (
            "is a list: give the whole of it" if isinstance(parent.value, list) else "has no keys"
        )
        raise ConfigError(f"{name} ({parent.origin}) {what}; write {name}=VALUE")
    child = _put(parent.value.get(keys[0]), keys[1:], node, (*done, keys[0]))
    return Node({**parent.value, keys[0]: child}, parent.origin, parent.under)
