"""Help for config keys: docstring, allowed values, default; and a JSON schema for editors."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from jtrain.config.dump import plain_values
from jtrain.config.schema import REQUIRED, FieldSchema, field_schemas, is_configclass
from jtrain.config.wording import describe_allowed, format_value
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean


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
            f"{dotted_key}: {keys[0]} is no key of {name}; {allowed}{did_you_mean(keys[0], known)}"
        )
    for kind, inner in having.items():
        for kinds, last in _find(inner, keys[1:], dotted_key):
            yield " ".join(filter(None, (kind, kinds))), last


def _with_default_of(default: Any, cls: type, key: str) -> FieldSchema:
    """Return the schema of a key, with its value in the default of the mapping that has it."""
    inner = field_schemas(cls)[key]
    if type(default) is not cls:
        return inner
    return dataclasses.replace(inner, default=getattr(default, key, inner.default))


def _help(want: FieldSchema) -> str:
    """Return the allowed values, default and docstring, for a mapping also those of its keys."""
    default = (
        "" if want.default is REQUIRED else f"; default {format_value(plain_values(want.default))}"
    )
    lines = [
        f"{describe_allowed(want)}{default or '; required'}",
        *([f"  {want.doc}"] if want.doc else []),
    ]
    named = {cls: f"{kind}: " for kind, cls in want.kinds().items()}
    tables = {cls: _table(cls) for cls in want.classes()}
    shared = [line for line in next(iter(tables.values()), []) if _in_all(line, tables)]
    for cls, table in tables.items():
        about = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"  {named.get(cls, '')}{about}".rstrip())
        lines += [line for line in table if line not in shared]
    if len(tables) > 1 and shared:
        lines.append("  all of them:")
    return "\n".join(filter(None, lines + shared))


def _table(cls: type) -> list[str]:
    """Return a line of help for each key but `kind`."""
    keys = {name: want for name, want in field_schemas(cls).items() if name != "kind"}
    return [
        f"    {name}: {describe_allowed(want)}. {want.doc}".rstrip() for name, want in keys.items()
    ]


def _in_all(line: str, tables: Mapping[type, list[str]]) -> bool:
    return all(line in table for table in tables.values())


def _classes(want: FieldSchema, seen: frozenset[type] = frozenset()) -> Iterator[type]:
    for cls in want.classes():
        if cls not in seen and is_configclass(cls):
            yield cls
            for inner in field_schemas(cls).values():
                yield from _classes(inner, seen | {cls})
    if (element := want.element()).annotation is not Any:
        yield from _classes(element, seen)
