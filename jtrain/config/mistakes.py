"""What pydantic found wrong with a config, told in the words of those who typed it."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic_core import ErrorDetails

from jtrain.config.nearest import did_you_mean, nearest
from jtrain.config.node import TYPED, Keys, Node, Plain, at, dotted, place, plain
from jtrain.config.schema import Want, choices, fields
from jtrain.config.words import any_of, describe, found, spell

BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def mistakes(schema: type, root: Node, errors: Sequence[ErrorDetails]) -> list[str]:
    """Each mistake once: where it was said, its key, what is allowed, and what was meant."""
    told: dict[Keys, list[str]] = {}
    for one in errors:
        keys, want, around = _walk(schema, one["loc"], root)
        keys, words = _tell(one, keys, want, around, root)
        if words not in told.setdefault(keys, []):
            told[keys].append(words)
    deeper = {other[:n] for other in told for n in range(1, len(other))}
    return [
        f"{place(root, keys)}: {words}"
        for keys, said in told.items()
        for words in said
        # A value that may be of several types fails as each of them: the deepest tells most.
        if not (keys in deeper and words.startswith("must be "))
    ]


def unknown(keys: Keys, allowed: Sequence[str], root: Node) -> str:
    """What to say of a key that nothing knows: what there is, and what was meant."""
    name = str(keys[-1])
    there = f" of {dotted(keys[:-1])}" if keys[:-1] else ""
    close = did_you_mean(name, allowed) or _elsewhere(name, root)
    if name == "<<":
        close = "; to inherit, write `base: other.yaml`"
    return f"is no key{there}; it has {', '.join(allowed)}{close}"


def _elsewhere(name: str, root: Node) -> str:
    """The dotted key that a key was meant to be, if there is such a one in the config."""
    if "." in name:
        first, _, rest = name.partition(".")
        return f"; in a file, write `{first}: {{{rest}: ...}}`"
    for parent, node in root.value.items():
        if isinstance(node.value, dict) and name in node.value:
            return f"; did you mean {parent}.{name}?"
    return ""


def _walk(schema: type, loc: tuple[int | str, ...], root: Node) -> tuple[Keys, Want, type | None]:
    """The keys as they were typed, what may stand there, and the dataclass around it.

    Between two keys pydantic puts the name of a choice, which nobody typed.
    """
    want, around, keys = Want(schema), None, ()
    for part in loc:
        written = at(root, keys).value
        if len(want.members()) > 1:
            named = {cls.__name__: cls for cls in want.classes()} | want.kinds()
            if str(part) in named:
                want = Want(named[str(part)])
                continue
            if not (isinstance(part, int) or (isinstance(written, dict) and part in written)):
                continue  # `list[int]`, `tagged-union[...]`
        if part == "[key]":
            break
        around = want.pick(plain(at(root, keys)))
        want = fields(around).get(str(part), Want(Any)) if around else want.element()
        keys = (*keys, part)
    return keys, want, around


def _tell(
    one: ErrorDetails, keys: Keys, want: Want, around: type | None, root: Node
) -> tuple[Keys, str]:
    """Where the mistake is, and what it is."""
    typed = at(root, keys).origin.layer == TYPED
    match one["type"]:
        case "missing":
            return keys, f"is missing; it needs {describe(want)}"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return keys, unknown(keys, list(fields(around)) if around else [], root)
        case "value_error" | "assertion_error":
            return keys, str(one.get("ctx", {}).get("error"))
        case "union_tag_not_found":
            kinds = list(want.kinds())
            how = f"{dotted(keys)}.kind={kinds[0]}" if typed else f"`kind: {kinds[0]}` in it"
            return keys, f"has no kind; allowed is {any_of(kinds)}: write {how}"
        case "union_tag_invalid":
            keys, want = (*keys, "kind"), Want(Literal[tuple(want.kinds())])
    value = plain(at(root, keys))
    return keys, f"must be {describe(want)}, found {found(value)}{_hint(keys, want, value, typed)}"


def _hint(keys: Keys, want: Want, value: Plain, typed: bool) -> str:
    """What to type instead, where that is plain to see."""
    types = [member.annotation for member in want.members()]
    offered = [str(choice) for t in types for choice in choices(t)]
    if isinstance(value, str):
        if {int, float} & set(types) and _number(value, float in types):
            return f"; write {value} without quotes"
        if bool in types and value.lower() in BOOLEANS:
            return f"; write {BOOLEANS[value.lower()]}"
        if kind := nearest(value, want.kinds()):
            whole = f"{dotted(keys)}.kind={kind}" if typed else f"{keys[-1]}: {{kind: {kind}}}"
            return f"; write {whole}"
        return did_you_mean(value, offered)
    if isinstance(value, float) and int in types and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, int | float) and str in types:
        text = json.dumps(spell(value))
        return f"; write {dotted(keys)}='{text}'" if typed else f"; write {text}"
    return ""


def _number(text: str, fraction: bool) -> bool:
    try:
        float(text) if fraction else int(text)
    except ValueError:
        return False
    return True
