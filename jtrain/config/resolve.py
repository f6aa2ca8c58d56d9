"""Resolution of a config file and typed settings into the values of a run, or into one error."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from jtrain.config.configclass import READ
from jtrain.config.dump import leaves, plain_values
from jtrain.config.lookup import (
    FoundExperiment,
    describe_available,
    find_config,
    find_experiment,
    load_experiment,
)
from jtrain.config.messages import describe_unknown_key, find_invalid_keys
from jtrain.config.node import (
    DEFAULT,
    DEFAULTS,
    FILE,
    PRESET,
    InvalidKey,
    Keys,
    Node,
    Plain,
    SourceLocation,
    dotted,
    find_node,
    invalid_key_at,
    make_nodes,
    merge,
    raise_invalid,
    without_origins,
)
from jtrain.config.read import merge_layers, put
from jtrain.config.schema import FieldSchema, field_schemas, format_value
from jtrain.config.top import EXPERIMENT, BaseConfig
from jtrain.errors import ConfigError
from jtrain.errors.spelling import nearest_key

T = TypeVar("T")

# Keys that most experiments add to BaseConfig. If the experiment is not found, a key that
# resembles one of these gets a suggestion.
OF_EXPERIMENTS = ("data", "model", "optimizer", "precision", "parallel", "workers", "trackers")
# What a dial may imply, until it has.
PLACEHOLDERS = {"steps": 1, "batch": 1, "optimizer": {"lr": 1.0}}
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
    if schema is None:
        found, missing = _experiment(root, path)
        if found is None:
            raise_invalid([*wrong, *missing, *_mistakes_of_top(root)])
        assert found, "a missing experiment is a mistake"
        schema = load_experiment(found)
    root, notes = resolve_kinds(FieldSchema(schema), root)
    root, implied = _over_dials(schema, root)
    notes += implied
    config, more = check(schema, root)
    known = {one.key for one in wrong}  # an unreadable value is not a second mistake
    # Dials that a typed preset turned off: what they implied is missing.
    off = [note for note in notes if note.partition(" ")[0] in schema.implied_by]
    raise_invalid([*wrong, *(one for one in more if one.key not in known)], off)
    assert config is not None, "what has no mistake is a config"
    raise_invalid(_problem(root, key, words, path) for key, words in config.problems())
    if path != typed:
        notes.insert(0, f"{typed} is the config that comes with jtrain: {path}")
    nodes = {dotted(keys): find_node(root, keys) for keys in leaves(config)}
    origins = {key: node.origin if node else DEFAULT for key, node in nodes.items()}
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
    node, keys = root.value.get("experiment"), ("experiment",)
    if node is None:
        words = f"is missing; write `experiment: NAME`, {describe_available(path)}"
        return None, [invalid_key_at(root, keys, words)]
    if not isinstance(node.value, str) or not EXPERIMENT.fullmatch(node.value):
        return None, []  # reported with the other keys of BaseConfig
    try:
        return find_experiment(node.value, path), []
    except ConfigError as error:
        return None, [invalid_key_at(root, keys, str(error))]


def _mistakes_of_top(root: Node) -> list[InvalidKey]:
    known = {key: node for key, node in root.value.items() if key in field_schemas(BaseConfig)}
    top, _ = resolve_kinds(FieldSchema(BaseConfig), Node(known, root.origin))
    strange = [(key,) for key in root.value if key not in KEYS and nearest_key(key, KEYS)]
    return check(BaseConfig, top, complete=False)[1] + [
        invalid_key_at(root, keys, describe_unknown_key(keys, KEYS, root, {})) for keys in strange
    ]


def _problem(root: Node, key: str, words: str, path: Path) -> InvalidKey:
    node = find_node(root, key.split("."))
    if node is None:
        return InvalidKey(SourceLocation(FILE, str(path)), key, f"{words} (a default)")
    return InvalidKey(node.origin, key, words)


def resolve_kinds(want: FieldSchema, node: Node, keys: Keys = ()) -> tuple[Node, list[str]]:
    """Return `node` with defaults and presets filled in, and a note on each key left out.

    A key is left out if the chosen `kind` does not have it. If the default of a key is a dataclass,
    giving one of its values keeps its others. A dataclass may have `presets` by name, `read_values`
    of the path that its key `from` has, and values `implied` by its `dials`: values given with
    `preset`, `from` or a dial, or after it, override those.
    """
    if isinstance(node.value, list):
        element = want.element()
        pairs = [resolve_kinds(element, child, (*keys, i)) for i, child in enumerate(node.value)]
        notes = [note for _, notes_of_child in pairs for note in notes_of_child]
        return Node([child for child, _ in pairs], node.origin, node.under), notes
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
    presets, read = getattr(chosen, "presets", {}), getattr(chosen, "read_values", None)
    children, notes = _over(children, keys, ["preset"], presets.get)
    if read is not None and not _complete(chosen, children):
        children, more = _over(children, keys, ["from"], read)
        notes += more
    if dials := getattr(chosen, "dials", None):
        plain = {key: without_origins(child) for key, child in children.items()}
        children, more = _over(children, keys, dials, lambda _: chosen.implied(plain))
        notes += more
    return children, notes


def _complete(chosen: type, children: dict[str, Node]) -> bool:
    """Return whether every key is given as late as `from`: then nothing is read."""
    layer = children["from"].origin.layer if "from" in children else DEFAULTS
    missing = field_schemas(chosen).keys() - children.keys()
    return not missing and all(child.origin.layer >= layer for child in children.values())


def _over(
    children: dict[str, Node],
    keys: Keys,
    sources: Sequence[str],
    values_of: Callable[[Any], Mapping[str, Any] | None],
) -> tuple[dict[str, Node], list[str]]:
    """Merge the keys over the values of the first source; those given before any source go."""
    name = children.get(sources[0], Node("", DEFAULT))
    known = name.value and isinstance(name.value, str | int)
    given = values_of(name.value) if known else None
    if given is None:
        return children, []
    layer = max(children[key].origin.layer for key in sources if key in children)
    label = f"{sources[0]} {name.value}"
    before = lambda key: key in given and children[key].origin.layer < layer
    notes = [
        note
        for key, child in children.items()
        if before(key) and (note := _left_out(dotted((*keys, key)), child, given[key], label))
    ]
    remaining = {key: child for key, child in children.items() if not before(key)}
    below = make_nodes(dict(given), SourceLocation(PRESET, setting=label))
    return merge(below, Node(remaining, name.origin)).value, notes


def _left_out(key: str, node: Node, value: Plain, source: str) -> str:
    """Return the note on a key whose written value another takes the place of; empty: none."""
    if node.origin.layer <= PRESET or without_origins(node) == value:
        return ""
    return f"{key} ({node.origin}) is left out: {source} was given after it"


def _over_dials(schema: type[BaseConfig], root: Node) -> tuple[Node, list[str]]:
    """Merge the keys over what the dials of an experiment imply; those given before them go."""
    dials = [find_node(root, key.split(".")) for key in schema.implied_by]
    if not dials or dials[0] is None or not dials[0].value:
        return root, []
    layer = max(dial.origin.layer for dial in dials if dial)
    given = lambda key: (node := find_node(root, key.split("."))) and node.origin.layer >= layer
    trial = merge(make_nodes(PLACEHOLDERS, DEFAULT), root)
    config, _ = check(schema, trial)
    if config is None:
        return trial, []  # its mistakes are reported, and nothing is missing
    label, notes = f"{schema.implied_by[0].rpartition('.')[2]} {dials[0].value}", []
    for key, value in config.implied(given).items():
        if given(key):
            continue
        keys = tuple(key.split("."))
        if node := find_node(root, keys):
            notes.append(_left_out(key, node, value, label))
        root = put(root, keys, Node(value, SourceLocation(PRESET, setting=label)))
    return root, list(filter(None, notes))


def _leave_out(
    want: FieldSchema, chosen: type, children: dict[str, Node], keys: Keys
) -> tuple[dict[str, Node], list[str]]:
    kind = children.get("kind")
    former, below = set(), kind.under if kind else None
    while below:
        cls = want.class_of(below.value) if isinstance(below.value, str) else None
        former |= set(field_schemas(cls)) if cls else set()
        below = below.under
    replaced = former - set(field_schemas(chosen))
    left = {
        key: child
        for key, child in children.items()
        if kind and key in replaced and child.origin.layer < kind.origin.layer
    }
    notes = [
        f"{dotted((*keys, key))} ({child.origin}) is left out: {format_value(kind.value)} has no "
        f"such key"
        for key, child in left.items()
        if kind and child.origin.layer > PRESET
    ]
    return {key: child for key, child in children.items() if key not in left}, notes
