"""Help for config keys, and pydantic's errors in the words of the config."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, get_args

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

from jtrain.config.configclass import is_configclass
from jtrain.config.dump import plain_values
from jtrain.config.node import (
    DEFAULTS,
    TYPED,
    InvalidKey,
    Keys,
    Node,
    Plain,
    SourceLocation,
    dotted,
    find_node,
    nearest_node,
    without_origins,
)
from jtrain.config.registry import OTHER
from jtrain.config.schema import (
    REQUIRED,
    FieldSchema,
    describe_allowed,
    describe_found,
    field_schemas,
    format_kinds,
    format_value,
    literal_choices,
)
from jtrain.errors import ConfigError
from jtrain.errors.spelling import MOVED, did_you_mean, nearest_choice, nearest_key

USUAL = {"lr": "1e-3"}
"""Values that a message writes for keys that must be given."""
FIRST = "adamw"  # the kind that a message writes, where it is one of the kinds
BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def find_invalid_keys(schema: type, root: Node, errors: Sequence[ErrorDetails]) -> list[InvalidKey]:
    """Return each validation error: its place, its key, the allowed values, a suggestion."""
    messages: dict[Keys, list[str]] = {}
    for one in errors:
        spot = _walk(schema, one["loc"], root)
        keys, words = _describe_error(one, spot, root)
        messages.setdefault(keys, []).append(words)
    deeper = {other[:n] for other in messages for n in range(1, len(other))}
    return [
        InvalidKey(_origin(root, keys, words), dotted(keys), words)
        for keys, sentences in messages.items()
        for words in sentences
        # A value of several allowed types fails for each; the deepest error is the most specific.
        if not (keys in deeper and words.startswith("must be "))
    ]


def _origin(root: Node, keys: Keys, words: str) -> SourceLocation:
    """Return the place of an error; for a missing key the place of the kind that needs it."""
    kind = find_node(root, (*keys[:-1], "kind"))
    if words.startswith("is missing") and kind and kind.origin.layer != DEFAULTS:
        return kind.origin
    node = nearest_node(root, keys)
    below = node.value.values() if isinstance(node.value, dict) else ()
    typed = (child.origin for child in below if child.origin.layer == TYPED)
    return next(typed, node.origin)  # values that do not fit together: the one that was typed


def describe_unknown_key(
    keys: Keys, allowed: Mapping[str, FieldSchema | None], root: Node, others: Mapping[str, type]
) -> str:
    """Describe an unknown key: the existing keys, and the nearest one.

    `others` are the other kinds of the mapping that has the key.
    """
    known = f" of {dotted(keys[:-1])}; it has" if keys[:-1] else "; the keys are"
    return f"is not a key{known} {', '.join(allowed)}{_meant(keys, allowed, root, others)}"


def _meant(
    keys: Keys, allowed: Mapping[str, FieldSchema | None], root: Node, others: Mapping[str, type]
) -> str:
    name, typed = str(keys[-1]), nearest_node(root, keys).origin.layer == TYPED
    first, dot, rest = name.partition(".")
    if dot:
        return f"; in a file, write `{first}: {{{rest}: ...}}`"
    if name == "<<":
        return "; to inherit, write `base: other.yaml`"
    if having := [kind for kind, cls in others.items() if name in field_schemas(cls)]:
        how = f"{dotted((*keys[:-1], 'kind'))}={having[0]}" if typed else f"`kind: {having[0]}`"
        return f"; kind {' or '.join(having)} has {name}; write {how} beside it"
    inside = {key: _keys_of(want) for key, want in reversed(list(allowed.items()))}
    owner = {below: key for key, names in inside.items() for below in names}  # the first one's
    close = nearest_key(name, allowed)
    if close and name not in owner:
        return f"; did you mean {dotted((*keys[:-1], close)) if typed else close}?"
    if len(keys) == 1 and name in MOVED:
        return f"; write {MOVED[name]}"
    if close := nearest_key(name, owner):
        return f"; did you mean {dotted((*keys[:-1], owner[close], close))}?"
    return ""


def _keys_of(want: FieldSchema | None) -> list[str]:
    return [name for cls in (want.classes() if want else ()) for name in field_schemas(cls)]


class _Spot(NamedTuple):
    keys: Keys  # as they were typed
    want: FieldSchema  # the allowed values
    around: type | None  # the dataclass of which it is a field, or would be
    others: Mapping[str, type]  # the other kinds of that mapping


def _walk(schema: type, loc: tuple[int | str, ...], root: Node) -> _Spot:
    """Follow pydantic's location; it inserts names of choices, which the file does not have."""
    keys, want, around, others, pending = (), FieldSchema(schema), None, {}, {}
    for part in loc:
        if part == "[key]":
            break
        written = without_origins(nearest_node(root, keys))
        if part == OTHER:
            want = FieldSchema(want.pick(written))
            continue
        if len(want.members()) > 1:
            pending = want.kinds()
            named = {cls.__name__: cls for cls in want.classes()} | pending
            if str(part) in named:
                want = FieldSchema(named[str(part)])
                continue
            if not (isinstance(part, int) or (isinstance(written, dict) and part in written)):
                continue  # `list[int]`, `tagged-union[...]`
        others, pending = pending, {}
        around = want.pick(written)
        want = field_schemas(around).get(str(part), FieldSchema(Any)) if around else want.element()
        keys = (*keys, part)
    return _Spot(keys, want, around, others)


def _describe_error(one: ErrorDetails, spot: _Spot, root: Node) -> tuple[Keys, str]:
    keys, want = spot.keys, spot.want
    typed = nearest_node(root, keys).origin.layer == TYPED
    match one["type"]:
        case "missing":
            needs = f"is missing; it needs {describe_allowed(want)}"
            typed = _origin(root, keys, needs).layer == TYPED
            return keys, needs + _advise(keys, USUAL.get(str(keys[-1]), _example(want)), typed)
        case "unexpected_keyword_argument" | "extra_forbidden":
            allowed = field_schemas(spot.around) if spot.around else {}
            return keys, describe_unknown_key(keys, allowed, root, spot.others)
        case "registry":
            return (*keys, "kind"), one["msg"]
        case "value_error" | "assertion_error":
            return keys, str(one.get("ctx", {}).get("error"))
        case "union_tag_not_found":
            kinds = list(want.kinds())
            given = nearest_node(root, keys).value
            kind = given if given in kinds else min(kinds, key=_preference(want))
            how = f"{dotted(keys)}.kind={kind}" if typed else f"`kind: {kind}` in it"
            if isinstance(keys[-1], int):
                how = f"{{kind: {kind}}}"
            return keys, f"has no kind, {format_kinds(want)}; write {how}"
        case "union_tag_invalid":
            allowed = format_kinds(want)
            keys, want = (*keys, "kind"), FieldSchema(Literal[tuple(want.kind_names())])
        case _:
            allowed = describe_allowed(want)
    node = nearest_node(root, keys)
    value = without_origins(node)
    return (
        keys,
        f"must be {allowed}, found "
        f"{describe_found(value)}"
        f"{_advise_text(keys, want, node, root) or _hint(keys, want, value, typed, node.text)}",
    )


def _hint(keys: Keys, want: FieldSchema, value: Plain, typed: bool, written: str) -> str:
    types = {member.annotation for member in want.members()}
    if kind := nearest_choice(written, want.kinds()):
        return _advise(keys, _mapping(kind, _required(want.kinds()[kind])), typed)
    if kind := nearest_choice(written, kinds := want.element().kinds()):
        return _advise(keys, f"[{_mapping(kind, _required(kinds[kind]))}]", typed)
    if isinstance(value, str):
        if {int, float} & types and (number := _number(value, float in types)):
            return f"; write {number} without quotes"
        if bool in types and value.lower() in BOOLEANS:
            return f"; write {BOOLEANS[value.lower()]}"
        if any(m is str or value in get_args(m) for each in types for m in get_args(each)[:1]):
            items = value if re.fullmatch(r"[A-Za-z][\w./*-]*", value) else json.dumps(value)
            return f"; write {dotted(keys)}='[{items}]'" if typed else f"; write [{items}]"
        return did_you_mean(value, [str(c) for t in types for c in literal_choices(t)])
    if isinstance(value, float) and int in types and value.is_integer():
        return f"; write {int(value)}"
    return _advise(keys, _example(want), typed)


def _advise_text(keys: Keys, want: FieldSchema, node: Node, root: Node) -> str:
    """Return the advice to quote a number that should be a text; empty if it is neither.

    What is typed sets no single element of a list, so the advice has the list.
    """
    takes_text = str in {member.annotation for member in want.members()}
    if not (takes_text and node.text and isinstance(node.value, int | float | None)):
        return ""
    if node.origin.layer != TYPED:
        return f"; write {json.dumps(node.text)}"
    depth = next((i for i, key in enumerate(keys) if isinstance(key, int)), len(keys))
    written = _written_texts(nearest_node(root, keys[:depth]))
    return f"; write {dotted(keys[:depth])}='{json.dumps(written)}'"


def _written_texts(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_written_texts(each) for each in node.value]
    return node.text or without_origins(node)


def _advise(keys: Keys, value: str, typed: bool) -> str:
    """Return `; write optimizer.lr=1e-3`, as it is typed or in a file; empty without a value."""
    if not value:
        return ""
    if isinstance(keys[-1], int):
        return f"; write {value} in its place"
    return f"; write {dotted(keys)}={value}" if typed else f"; write {keys[-1]}: {value}"


def _example(want: FieldSchema) -> str:
    """Return a mapping that is enough: `{kind: adamw, lr: 1e-3}`; empty if there is none."""
    kinds = want.kinds()
    for kind in sorted(kinds, key=_preference(want)):
        cls = kinds[kind]
        if _required(cls) <= USUAL.keys():
            return _mapping(kind, _required(cls))
    return ""


def _preference(want: FieldSchema) -> Callable[[str], tuple[bool, bool]]:
    """Return the key by which the default kind is sorted first, then the usual one."""
    default = getattr(want.default, "kind", None)
    return lambda kind: (kind != default, kind != FIRST)


def _required(cls: type) -> set[str]:
    wanted = field_schemas(cls).items()
    return {key for key, want in wanted if want.default is REQUIRED and key != "kind"}


def _mapping(kind: str, required: Set[str]) -> str:
    more = "".join(f", {key}: {USUAL[key]}" for key in sorted(required & USUAL.keys()))
    return f"{{kind: {kind}{more}}}"


def _number(text: str, fraction: bool) -> str:
    """Return the number that a text means, as YAML has it; empty if it means none."""
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text
    try:
        number = float(plain) if fraction else int(plain)
    except ValueError:
        return ""
    return format_value(number) if math.isfinite(number) else ""


def explain(schema: type, key: str) -> str:
    """Return the help of a dotted key, for every kind that has it.

    Raises:
        ConfigError: if no kind has it, with the nearest key of any kind.
    """
    found: dict[str, list[str]] = {}
    for kinds, want in _find(FieldSchema(schema), key.split("."), key):
        found.setdefault(_help(want), []).append(kinds)
    sections = []
    for text, kinds in found.items():
        named = ", ".join(dict.fromkeys(filter(None, kinds)))
        sections.append(f"{key}{f' ({named})' if named else ''}: {text}")
    return "\n".join(sections)


def find_schemas(schema: type, key: str) -> list[FieldSchema]:
    """Return the schemas of a dotted key, one for each kind that has it."""
    try:
        return [want for _, want in _find(FieldSchema(schema), key.split("."), key)]
    except ConfigError:
        return []


def json_schema(schema: type) -> dict[str, Any]:
    """Return the JSON schema of a config file; a file with a `base` may lack any key."""
    found = TypeAdapter(schema).json_schema()
    tables = {schema.__name__: found, **found.get("$defs", {})}
    for cls in _classes(FieldSchema(schema)):
        for name, want in field_schemas(cls).items():
            if want.doc and cls.__name__ in tables:
                tables[cls.__name__]["properties"][name].setdefault("description", want.doc)
    inherit = {"type": "string", "description": "A config beside this one that it inherits from."}
    found["properties"] = {"base": inherit, **found["properties"]}
    if required := found.pop("required", None):
        found["anyOf"] = [{"required": ["base"]}, {"required": required}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _find(want: FieldSchema, keys: list[str], dotted_key: str) -> Iterator[tuple[str, FieldSchema]]:
    """Yield each schema of a key, with the kinds on the way to it."""
    if not keys:
        yield "", want
        return
    classes = want.classes()
    owners = want.kinds() if len(classes) > 1 else dict(zip([""], classes, strict=False))
    having = {
        kind: _with_default_of(want.default, cls, keys[0])
        for kind, cls in owners.items()
        if keys[0] in field_schemas(cls)
    }
    if not having:
        known = list(dict.fromkeys(name for cls in owners.values() for name in field_schemas(cls)))
        allowed = f"it has {', '.join(known)}" if known else f"it is {describe_allowed(want)}"
        around = dotted_key.split(".")[: -len(keys)]
        name = ".".join(around) or "a config"
        raise ConfigError(
            f"{dotted_key}: {keys[0]} is not a key of {name}; {allowed}"
            f"{did_you_mean(keys[0], known)}"
        )
    for kind, inner in having.items():
        for kinds, last in _find(inner, keys[1:], dotted_key):
            yield " ".join(filter(None, (kind, kinds))), last


def _with_default_of(default: Any, cls: type, key: str) -> FieldSchema:
    inner = field_schemas(cls)[key]
    if type(default) is not cls:
        return inner
    return dataclasses.replace(inner, default=getattr(default, key, inner.default))


def _help(want: FieldSchema) -> str:
    required = want.default is REQUIRED
    default = "required" if required else f"default {format_value(plain_values(want.default))}"
    lines = [f"{describe_allowed(want)}; {default}", f"  {want.doc}" if want.doc else ""]
    named = {cls: f"{kind}: " for kind, cls in want.kinds().items()}
    tables = {cls: _table(cls) for cls in want.classes()}
    first, *others = tables.values() or [[]]
    shared = [line for line in first if all(line in table for table in others)]
    for cls, table in tables.items():
        about = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"  {named.get(cls, '')}{about}".rstrip())
        lines += [line for line in table if line not in shared]
    if len(tables) > 1 and shared:
        lines.append("  all of them:")
    return "\n".join(filter(None, lines + shared))


def _table(cls: type) -> list[str]:
    keys = {name: want for name, want in field_schemas(cls).items() if name != "kind"}
    return [
        f"    {name}: {describe_allowed(want)}. {want.doc}".rstrip() for name, want in keys.items()
    ]


def _classes(want: FieldSchema, seen: frozenset[type] = frozenset()) -> Iterator[type]:
    for cls in want.classes():
        if cls not in seen and is_configclass(cls):
            yield cls
            for inner in field_schemas(cls).values():
                yield from _classes(inner, seen | {cls})
    if (element := want.element()).annotation is not Any:
        yield from _classes(element, seen)
