"""Kinds and presets: their defaults are filled in, and keys of a replaced kind are dropped."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jtrain.config.dump import plain_values
from jtrain.config.node import (
    DEFAULT,
    DEFAULTS,
    PRESET,
    Keys,
    Node,
    SourceLocation,
    dotted,
    make_nodes,
    merge,
    without_origins,
)
from jtrain.config.schema import FieldSchema, field_schemas
from jtrain.config.wording import format_value


def resolve_kinds(want: FieldSchema, node: Node, keys: Keys = ()) -> tuple[Node, list[str]]:
    """Return `node` with defaults and presets filled in, and a note on each key left out.

    A key is left out if the chosen `kind` does not have it. If the default of a key is a dataclass,
    giving one of its values keeps its others. A dataclass may have `presets` by name, and
    `read_values` of the path that its key `from` has: values given with `preset` or `from`, or
    after it, override those.
    """
    if isinstance(node.value, list):
        element = want.element()
        pairs = [resolve_kinds(element, child, (*keys, i)) for i, child in enumerate(node.value)]
        return Node([n for n, _ in pairs], node.origin, node.under), [
            t for _, s in pairs for t in s
        ]
    if not isinstance(node.value, dict):
        return node, []
    children = dict(node.value)
    kind = getattr(want.default, "kind", None)
    if kind is not None and "kind" not in children and len(want.kinds()) > 1:
        children["kind"] = Node(kind, DEFAULT)
    chosen = want.pick({key: child.value for key, child in children.items()})
    if chosen is None:
        return node, []
    children, notes = _leave_out(want, chosen, children, keys)
    children, more = _over_preset(chosen, children, keys)
    notes += more
    default = want.default if type(want.default) is chosen else None
    if default is not None:
        children = make_nodes(plain_values(default), DEFAULT).value | children
    for key, inner in field_schemas(chosen).items():
        if key in children:
            inner = replace(inner, default=getattr(default, key, inner.default))
            children[key], inner_notes = resolve_kinds(inner, children[key], (*keys, key))
            notes += inner_notes
    return Node(children, node.origin, node.under), notes


def _over_preset(
    chosen: type, children: dict[str, Node], keys: Keys
) -> tuple[dict[str, Node], list[str]]:
    """Merge the keys over the preset's, dropping inherited keys that the preset replaces."""
    children, notes = _over(chosen, children, keys, "preset", getattr(chosen, "presets", {}).get)
    read = getattr(chosen, "read_values", None)
    if read is None or _complete(chosen, children):
        return children, notes
    children, more = _over(chosen, children, keys, "from", read)
    return children, notes + more


def _complete(chosen: type, children: dict[str, Node]) -> bool:
    """Return whether every key is given as late as `from`: then nothing is read."""
    layer = children["from"].origin.layer if "from" in children else DEFAULTS
    missing = field_schemas(chosen).keys() - children.keys()
    return not missing and all(child.origin.layer >= layer for child in children.values())


def _over(
    chosen: type,
    children: dict[str, Node],
    keys: Keys,
    source: str,
    values_of: Callable[[str], Mapping[str, Any] | None],
) -> tuple[dict[str, Node], list[str]]:
    """Merge the keys over the values that the key `source` stands for."""
    name = children.get(source, Node("", DEFAULT))
    given = values_of(name.value) if isinstance(name.value, str) and name.value else None
    if given is None:
        return children, []
    before = lambda key: key in given and children[key].origin.layer < name.origin.layer
    left = [key for key in children if before(key) and without_origins(children[key]) != given[key]]
    remaining = {key: child for key, child in children.items() if not before(key)}
    below = make_nodes(dict(given), SourceLocation(PRESET, setting=f"{source} {name.value}"))
    notes = [
        f"{dotted((*keys, key))} ({children[key].origin}) is left out: "
        f"{source} {name.value} was given after it"
        for key in left
    ]
    return merge(below, Node(remaining, name.origin)).value, notes


def _leave_out(
    want: FieldSchema, chosen: type, children: dict[str, Node], keys: Keys
) -> tuple[dict[str, Node], list[str]]:
    """Drop the keys of a kind that a higher layer replaced."""
    kind = children.get("kind")
    former, below = set(), kind.under if kind else None
    while below:
        cls = want.kinds().get(below.value) if isinstance(below.value, str) else None
        former |= set(field_schemas(cls)) if cls else set()
        below = below.under
    remaining, notes = {}, []
    for key, child in children.items():
        if (
            kind
            and key in former - set(field_schemas(chosen))
            and child.origin.layer < kind.origin.layer
        ):
            if child.origin.layer > PRESET:
                name = dotted((*keys, key))
                notes.append(
                    f"{name} ({child.origin}) is left out: {format_value(kind.value)} has "
                    "no such key"
                )
        else:
            remaining[key] = child
    return remaining, notes
