"""Stored values of a run, read by the current schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from jtrain.config.messages import find_invalid_keys
from jtrain.config.node import (
    FILE,
    Node,
    Plain,
    SourceLocation,
    make_nodes,
    raise_invalid,
    without_origins,
)
from jtrain.config.resolve import check, resolve_kinds
from jtrain.config.schema import FieldSchema
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError

C = TypeVar("C", bound=BaseConfig)
_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}


def load_values(values: Plain, schema: type[C], where: Path) -> tuple[C, list[str]]:
    """Return stored values as a config, and the keys that `schema` no longer has.

    A key that is new in `schema` has its default.

    Args:
        values: the result of `to_plain` for a config.

    Raises:
        ConfigError: if a value is not of the type that it has in `schema`.
    """
    origin = SourceLocation(FILE, str(where))
    if not isinstance(values, dict):
        raise ConfigError(f"{origin.place('')}: holds no values of a config")
    root, _ = resolve_kinds(FieldSchema(schema), make_nodes(values, origin))
    root, dropped = _without_unknown(schema, root)
    config, wrong = check(schema, root)
    raise_invalid(wrong)
    assert config is not None, "what has no mistake is a config"
    return config, dropped


def _without_unknown(schema: type, root: Node) -> tuple[Node, list[str]]:
    try:
        TypeAdapter(schema).validate_json(json.dumps(without_origins(root)), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        unknown = find_invalid_keys(
            schema, root, [each for each in found if each["type"] in _UNKNOWN]
        )
        for each in unknown:
            root = _without(root, each.key.split("."))
        return root, [each.key for each in unknown]
    return root, []


def _without(node: Node, keys: Sequence[str]) -> Node:
    first, *rest = keys
    if isinstance(node.value, list):
        place = int(first)
        value = [*node.value]
        value[place] = _without(value[place], rest)
    else:
        value = {name: child for name, child in node.value.items() if rest or name != first}
        if rest:
            value[first] = _without(value[first], rest)
    return Node(value, node.origin, node.under, node.text)
