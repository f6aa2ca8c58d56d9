"""Stored values of a run: read by the current schema, and written as settings to type."""

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from jtrain.config.dump import ABSENT, Difference, diff_configs, to_plain
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
from jtrain.config.resolve import check, resolve, resolve_kinds
from jtrain.config.schema import FieldSchema, format_value
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError

C = TypeVar("C", bound=BaseConfig)
_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}


def load_values(values: Plain, schema: type[C], where: Path) -> tuple[C, list[str]]:
    """Return stored values as a config, and the keys that `schema` no longer has.

    A key that is new in `schema` has its default.

    Args:
        values: the result of `to_plain` for a config.
        schema: the experiment's Config.
        where: the file that they were read from, for the message.

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


def settings_for(path: Path, wanted: BaseConfig, may_differ: Iterable[str]) -> list[str] | None:
    """Return the settings that give the values of `wanted` when they are typed after a config file.

    Args:
        path: the config file.
        wanted: the values.
        may_differ: top keys that are left as they are in the file.

    Returns:
        `key=value`, quoted for a shell; empty if the file has these values; None if the file cannot
        be read, or no settings give these values.
    """
    try:
        config = resolve(path, schema=type(wanted)).config
        changed = _that_matter(config, wanted, may_differ)
        settings = _settings(changed, to_plain(wanted))
        again = resolve(path, settings, schema=type(wanted)).config if settings else config
    except ConfigError:
        return None
    if _that_matter(again, wanted, may_differ):
        return None
    return [shlex.quote(setting) for setting in settings]


def _that_matter(one: BaseConfig, other: BaseConfig, may_differ: Iterable[str]) -> list[Difference]:
    changed = diff_configs(to_plain(one), to_plain(other))
    return [change for change in changed if change.key.split(".")[0] not in may_differ]


def _settings(changed: Sequence[Difference], wanted: Plain) -> list[str]:
    """Return `key=value` for each change; a complete mapping where its `kind` differs."""
    kinds = [key for key, *_ in changed if key.endswith(".kind")]
    mappings = {key.removesuffix(".kind") for key in kinds}
    mappings = {
        key for key in mappings if not any(key.startswith(f"{other}.") for other in mappings)
    }
    inner = lambda key: any(key.startswith(f"{each}.") for each in mappings)
    single = {key: value for key, _, value in changed if not inner(key) and value is not ABSENT}
    return [f"{key}={format_value(value)}" for key, value in single.items()] + [
        f"{key}={format_value(_at(wanted, key))}" for key in sorted(mappings)
    ]


def _at(values: Plain, key: str) -> Plain:
    for name in key.split("."):
        values = values[name]
    return values


def _without_unknown(schema: type, root: Node) -> tuple[Node, list[str]]:
    """Return the values without keys unknown to the schema, and those keys."""
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
