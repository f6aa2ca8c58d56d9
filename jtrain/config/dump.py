"""Values as text: every value of a config as YAML that runs, differences of two, manifests."""

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import LiteralScalarString

from jtrain.config.node import Plain
from jtrain.config.schema import format_value, key_of
from jtrain.io.redact import redact_values


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Difference(NamedTuple):
    """A key whose values differ between two configs; ABSENT where one lacks it."""

    key: str
    before: Any
    after: Any


def plain_values(config: Any) -> Plain:
    """Return a config, or a part of it, as JSON types, with its secrets; `kind` first."""
    if dataclasses.is_dataclass(config):
        names = [field.name for field in dataclasses.fields(config)]
        names.sort(key=lambda name: name != "kind")  # it decides which other keys there are
        cls = type(config)
        values = {key_of(cls, name): plain_values(getattr(config, name)) for name in names}
        if values.get("kind") == "":  # of a class that is in no registry by name
            values["kind"] = f"{cls.__module__}:{cls.__qualname__}"
        return values
    if isinstance(config, Mapping):
        return {str(key): plain_values(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain_values(value) for value in config]
    return str(config) if isinstance(config, PurePath) else config


def to_plain(config: Any) -> Plain:
    """Return `plain_values` with secrets redacted, as a config is written to files."""
    return redact_values(plain_values(config))


def leaves(config: Any) -> dict[tuple[str, ...], Plain]:
    """Return each value by its tuple of keys; a list is one value."""
    return dict(_leaves(plain_values(config), ()))


def _leaves(value: Plain, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Plain]]:
    if not isinstance(value, dict) or not value:
        yield keys, value
        return
    for name, child in value.items():
        yield from _leaves(child, (*keys, name))


def flatten(config: Any) -> dict[str, Plain]:
    """Return each value by its dotted key; a list is one value."""
    return {".".join(keys): value for keys, value in leaves(config).items()}


def dump(config: Any, header: str = "") -> str:
    """Return YAML that resolves to the same config; secrets are not redacted: see `to_plain`."""
    comment = [f"# {line}".rstrip() for line in header.splitlines()]
    return "\n".join([*comment, *_lines(plain_values(config), 0)]) + "\n"


def _lines(tree: dict[str, Plain], depth: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        opening = f"{'  ' * depth}{format_value(key)}:"
        if isinstance(value, dict) and value:
            lines += [opening, *_lines(value, depth + 1)]
        else:
            lines.append(f"{opening} {format_value(value)}")
    return lines


def diff_configs(before: Any, after: Any) -> list[Difference]:
    """Return the keys whose values differ between two configs, in the order of the first."""
    old, new = flatten(before), flatten(after)
    pairs = [(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new}]
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


_WIDTH = 96  # characters of a list on one line; ruamel counts without the indent


def format_blocks(documents: Sequence[Any], header: str = "") -> str:
    """Return documents as YAML, texts of several lines as they are.

    Args:
        documents: JSON values; the keys of mappings stay in their order.
        header: lines of a comment above.
    """
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096  # a command stays on one line
    stream = io.StringIO()
    stream.writelines(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    for i, document in enumerate(documents):
        stream.write("---\n" if i else "")
        yaml.dump(_blocks(document), stream)
    return stream.getvalue().rstrip("\n") + "\n"  # none after a text at the end


def _blocks(value: Any) -> Any:
    if isinstance(value, dict):
        return CommentedMap((key, _blocks(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        items = CommentedSeq(map(_blocks, value))
        scalars = not any(isinstance(item, dict | list | tuple) for item in value)
        if scalars and sum(len(str(item)) + 2 for item in value) <= _WIDTH:
            items.fa.set_flow_style()
        return items
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value
