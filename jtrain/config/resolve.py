"""Resolution of a config file and typed settings into the values of a run, or into one error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from jtrain.config.dump import leaves
from jtrain.config.durations import describe_durations
from jtrain.config.error_messages import describe_unknown_key, find_invalid_keys
from jtrain.config.kinds import resolve_kinds
from jtrain.config.layers import merge_layers
from jtrain.config.lookup import (
    FoundExperiment,
    describe_available,
    find_config,
    find_experiment,
    load_experiment,
)
from jtrain.config.node import (
    DEFAULT,
    FILE,
    InvalidKey,
    Keys,
    Node,
    SourceLocation,
    dotted,
    find_node,
    invalid_key_at,
    raise_invalid,
    without_origins,
)
from jtrain.config.schema import FieldSchema, field_schemas
from jtrain.config.top import BaseConfig
from jtrain.config.write_paths import READ
from jtrain.errors import ConfigError
from jtrain.errors.spelling import nearest_key

T = TypeVar("T")

# Keys that most experiments add to BaseConfig. If the experiment is not found, a key that
# resembles one of these gets a suggestion.
OF_EXPERIMENTS = ("data", "model", "optimizer", "precision", "parallel", "workers", "trackers")
KEYS = dict.fromkeys(("base", *field_schemas(BaseConfig), *OF_EXPERIMENTS))


@dataclass(frozen=True)
class ResolvedConfig:
    """Values of a run, with the source of each."""

    config: Any  # an instance of `schema`
    schema: type[BaseConfig]
    origins: Mapping[str, SourceLocation]  # by dotted key
    notes: tuple[str, ...]  # notes for the reader: keys left out by a new kind
    path: Path


def resolve(
    path: Path | str, settings: Sequence[str] = (), *, schema: type[BaseConfig] | None = None
) -> ResolvedConfig:
    """Resolve the config in a file, with `a.b=value` over it.

    An error lists all mistakes of a stage. The first stage has those of the file, the settings and
    the values; the second has values that conflict. If the experiment is not found, the YAML and
    the keys of `BaseConfig` are still checked, without importing jax.

    Args:
        path: a YAML file, or the name of a config that comes with jtrain.
        settings: `a.b=value`, typed after it.
        schema: the experiment's Config; None: the experiment is looked up.

    Raises:
        ConfigError: with a line for each mistake of a stage.
    """
    typed, path = Path(path), find_config(path)
    root, wrong = merge_layers(path, settings)
    root = _named(root, path)
    found, missing = (None, []) if schema else _experiment(root, path)
    if schema is None and found is None:
        raise_invalid([*wrong, *missing, *_mistakes_of_top(root)])
    if schema is None:
        assert found, "a missing experiment is a mistake"
        schema = load_experiment(found)
    root, notes = resolve_kinds(FieldSchema(schema), root)
    config, more = check(schema, root)
    known = {one.key for one in wrong}  # an unreadable value is no second mistake
    raise_invalid([*wrong, *(one for one in more if one.key not in known)])
    assert config is not None, "what has no mistake is a config"
    raise_invalid(_misfit(root, key, words, path) for key, words in config.misfits())
    notes = [*notes, *describe_durations(config)]
    if path != typed:
        notes.insert(0, f"{typed} is the config that comes with jtrain: {path}")
    origins = {dotted(keys): _origin(root, keys) for keys in leaves(config)}
    return ResolvedConfig(config, schema, origins, tuple(notes), path)


def check(
    schema: type[T], root: Node, *, complete: bool = True
) -> tuple[T | None, list[InvalidKey]]:
    """Return the values as a `schema`, or their errors; top keys may be missing."""
    try:
        # From JSON, so that strict means: no text for a number, no true for 1, a list for a tuple.
        text = json.dumps(without_origins(root))
        adapter = TypeAdapter(schema)
        value = adapter.validate_json(text, strict=True, context=READ, by_alias=True, by_name=False)
        return value, []
    except ValidationError as error:
        details = error.errors(include_url=False)
        if not complete:
            details = [one for one in details if one["type"] != "missing" or len(one["loc"]) > 1]
        return None, find_invalid_keys(schema, root, details)


def _named(root: Node, path: Path) -> Node:
    """Set the name of the file as the name of a run that has none."""
    name = root.value.get("name")
    if name and name.value != "":
        return root
    return Node({**root.value, "name": Node(path.stem, DEFAULT)}, root.origin)


def _experiment(root: Node, path: Path) -> tuple[FoundExperiment | None, list[InvalidKey]]:
    """Return the experiment that a config names, or an error."""
    node, keys = root.value.get("experiment"), ("experiment",)
    if node is None:
        words = f"is missing; write `experiment: NAME`, {describe_available(path)}"
        return None, [invalid_key_at(root, keys, words)]
    if not isinstance(node.value, str) or not node.value.isidentifier():
        return None, []  # reported with the other keys of BaseConfig
    try:
        return find_experiment(node.value, path), []
    except ConfigError as error:
        return None, [invalid_key_at(root, keys, str(error))]


def _mistakes_of_top(root: Node) -> list[InvalidKey]:
    """Return the errors in the keys that every config has, for any experiment."""
    known = {key: node for key, node in root.value.items() if key in field_schemas(BaseConfig)}
    top, _ = resolve_kinds(
        FieldSchema(BaseConfig), Node(known, root.origin)
    )  # otherwise a default kind would be missing
    strange = [(key,) for key in root.value if key not in KEYS and nearest_key(key, KEYS)]
    return check(BaseConfig, top, complete=False)[1] + [
        invalid_key_at(root, keys, describe_unknown_key(keys, KEYS, root, {})) for keys in strange
    ]


def _misfit(root: Node, key: str, words: str, path: Path) -> InvalidKey:
    node = find_node(root, key.split("."))
    if node is None:
        return InvalidKey(SourceLocation(FILE, str(path)), key, f"{words} (a default)")
    return InvalidKey(node.origin, key, words)


def _origin(root: Node, keys: Keys) -> SourceLocation:
    node = find_node(root, keys)
    return node.origin if node else DEFAULT
