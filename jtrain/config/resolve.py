"""A config file and what was typed become the values of a run, or one error with every mistake."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from jtrain.config.dump import leaves
from jtrain.config.layers import layers
from jtrain.config.lookup import Found, available, find, load
from jtrain.config.mistakes import mistakes, unknown
from jtrain.config.node import DEFAULT, FILE, Keys, Node, Origin, dotted, place, plain, said
from jtrain.config.schema import Want, fields
from jtrain.config.settle import settle
from jtrain.config.top import Top
from jtrain.errors import ConfigError

T = TypeVar("T")

# What an experiment's Config may have beside the keys of Top: a misspelt key is told before the
# experiment, and with it jax, is imported.
OF_EXPERIMENTS = ("data", "model", "optimizer", "precision", "parallel", "trackers")
KEYS = ("base", *fields(Top), *OF_EXPERIMENTS)


@dataclass(frozen=True)
class Resolved:
    """The values of a run, and where each was said."""

    config: Any  # an instance of `schema`
    schema: type[Top]
    origins: Mapping[str, Origin]  # by dotted key
    notes: tuple[str, ...]  # what a reader should know: keys left out by a new kind
    path: Path


def resolve(path: Path | str, settings: Sequence[str] = ()) -> Resolved:
    """The config in a file, with `a.b=value` laid over it.

    Mistakes are told together, in three stages: what needs only the YAML and the keys of `Top`,
    without jax; the experiment's values; values that do not fit together.

    Raises:
        ConfigError: with a line for each mistake of the first stage that has any.
    """
    path = Path(path)
    root, wrong = layers(path, settings)
    root = _named(root, path)
    strange = [key for key in root.value if key not in KEYS]
    wrong += [f"{place(root, (key,))}: {unknown((key,), KEYS, root)}" for key in strange]
    wrong += _top(root)
    found, missing = _experiment(root, path)
    _stop([*wrong, *missing])
    assert found, "an experiment that is not there is a mistake"
    schema = load(found)
    _settable(schema)
    root, notes = settle(Want(schema), root)
    config, wrong = check(schema, root)
    _stop(wrong)
    assert config is not None, "what has no mistake is a config"
    _stop(f"{_misfit_place(root, key, path)}: {words}" for key, words in config.misfits())
    origins = {dotted(keys): _origin(root, keys) for keys in leaves(config)}
    return Resolved(config, schema, origins, tuple(notes), path)


def check(schema: type[T], root: Node, *, whole: bool = True) -> tuple[T | None, list[str]]:
    """The values as a `schema`, or what is wrong with them; not whole: top keys may be missing."""
    try:
        # From JSON, so that strict means: no text for a number, no true for 1, a list for a tuple.
        return TypeAdapter(schema).validate_json(json.dumps(plain(root)), strict=True), []
    except ValidationError as error:
        told = error.errors(include_url=False)
        if not whole:
            told = [one for one in told if one["type"] != "missing" or len(one["loc"]) > 1]
        return None, mistakes(schema, root, told)


def _named(root: Node, path: Path) -> Node:
    """The name of the file for a run that has none."""
    name = root.value.get("name")
    if name and name.value != "":
        return root
    return Node({**root.value, "name": Node(path.stem, DEFAULT)}, root.origin)


def _top(root: Node) -> list[str]:
    """What is wrong with the keys that every config has; an experiment may yet default some."""
    known = {key: node for key, node in root.value.items() if key in fields(Top)}
    return check(Top, Node(known, root.origin), whole=False)[1]


def _experiment(root: Node, path: Path) -> tuple[Found | None, list[str]]:
    """The experiment that a config names, or why there is none."""
    node = root.value.get("experiment")
    if node is None:
        names = ", ".join(available(path)) or "none yet: write experiments/NAME.py"
        opening = place(root, ("experiment",))
        return None, [f"{opening}: is missing; write `experiment: NAME`, there is {names}"]
    if not isinstance(node.value, str) or not node.value.isidentifier():
        return None, []  # told with the other keys of Top
    try:
        return find(node.value, path), []
    except ConfigError as error:
        return None, [f"{place(root, ('experiment',))}: {error}"]


def _settable(schema: type[Top]) -> None:
    strange = [key for key in fields(schema) if key not in KEYS]
    if strange:
        raise ConfigError(
            f"{schema.__module__}.Config has {', '.join(strange)}, and the keys of a config are "
            f"{', '.join(KEYS)}; move it into data or model"
        )


def _misfit_place(root: Node, key: str, path: Path) -> str:
    keys = tuple(key.split("."))
    return place(root, keys) if said(root, keys) else Origin(FILE, str(path)).place(key)


def _origin(root: Node, keys: Keys) -> Origin:
    node = said(root, keys)
    return node.origin if node else DEFAULT


def _stop(wrong: Iterable[str]) -> None:
    lines = list(dict.fromkeys(wrong))
    if lines:
        raise ConfigError("\n".join(lines))
