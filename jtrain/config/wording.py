"""Wording of values and types in messages, as a user types them."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from jtrain.config.node import Plain
from jtrain.config.schema import FieldSchema, field_schemas, is_configclass, literal_choices

NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
    dict: "a mapping",
    Any: "anything",
}
PLAIN = re.compile(r"[A-Za-z_/][\w./+-]*( [\w./+-]+)*", re.ASCII)
WORDS = {"true", "false", "null"}


def format_value(value: Plain) -> str:
    """Return a value as YAML on one line, as typed on a command line."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in WORDS:
            return value
        # JSON is YAML but for characters that are written as they are there.
        return "".join(
            c if c.isprintable() else _escape(c) for c in json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def describe_allowed(want: FieldSchema) -> str:
    """Return the allowed values: `a whole number above 0`, `one of sgd, adamw`."""
    members = want.members()
    if any(member.annotation is float for member in members):
        members = [member for member in members if member.annotation is not int]
    kinds = list(want.kinds())
    wordings = [_one(m) for m in members if not (len(kinds) > 1 and is_configclass(m.annotation))]
    if len(kinds) > 1:
        wordings.insert(0, f"a mapping with a kind, one of {', '.join(kinds)}")
    return " or ".join(dict.fromkeys(wordings))


def _one(want: FieldSchema) -> str:
    limited = want.limits and want.annotation is not type(None)
    limits = f" {' and '.join(want.limits)}" if limited else ""
    if offered := literal_choices(want.annotation):
        return format_choices(offered)
    if is_configclass(want.annotation):
        return f"a mapping with {', '.join(field_schemas(want.annotation))}"
    if get_origin(want.annotation) in {list, tuple}:
        arguments = [a for a in get_args(want.annotation) if a is not Ellipsis]
        if len(arguments) == 1:
            return f"a list{limits}, of each {describe_allowed(FieldSchema(arguments[0]))}"
        return (
            f"a list of {len(arguments)}: "
            f"{', '.join(describe_allowed(FieldSchema(a)) for a in arguments)}"
        )
    name = NAMES.get(get_origin(want.annotation) or want.annotation)
    return (name or getattr(want.annotation, "__name__", str(want.annotation))) + limits


def format_choices(offered: Sequence[Plain]) -> str:
    """Return `sgd` for a single choice, and `one of sgd, adamw` for several."""
    spelt = ", ".join(map(format_value, offered))
    return spelt if len(offered) == 1 else f"one of {spelt}"


def describe_found(value: Plain) -> str:
    """Return the text, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = format_value(value)
    if isinstance(value, str):
        text = f"the text {text if text.startswith(chr(34)) else json.dumps(value)}"
    return text if len(text) < 80 else f"{text[:76]} ..."
