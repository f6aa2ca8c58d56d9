"""Completion of commands in shells, by argcomplete."""

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.cli import VERBS
from jtrain.cli.arguments import Arguments
from jtrain.config.dump import flatten, plain_values
from jtrain.config.lookup import YAML, shipped_configs
from jtrain.config.messages import find_schemas
from jtrain.config.resolve import resolve
from jtrain.config.schema import literal_choices
from jtrain.errors import UserError


def complete() -> None:
    """Write the words that may follow the command line of the shell, and end the process."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:  # it is installed for another Python
        return
    words = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="jtrain")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for verb in VERBS:
        if words[1:2] == [verb]:
            _add_verb(verbs, verb)
        else:
            verbs.add_parser(verb)
    argcomplete.autocomplete(parser)


def _add_verb(verbs: Any, verb: str) -> None:
    module = importlib.import_module(f"jtrain.cli.{verb}")
    if hasattr(module, "arguments_of"):  # it has subcommands
        actions = verbs.add_parser(verb).add_subparsers()
        for action in module.DOES:
            _add_arguments(actions, action, module.arguments_of(action))
    else:
        _add_arguments(verbs, verb, module._arguments())


def _add_arguments(verbs: Any, verb: str, arguments: Arguments) -> None:
    for action in arguments._actions:
        kind = str(action.metavar).partition(" ")[0]
        if kind in _COMPLETERS and not action.option_strings:
            action.completer = _COMPLETERS[kind]  # pyright: ignore[reportAttributeAccessIssue]
    verbs.add_parser(verb, parents=[arguments], add_help=False)


def _config_and_settings(prefix: str, **_: Any) -> Sequence[str]:
    """Return the configs, or the settings of the config that was typed."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = [word for word in line.removesuffix(prefix).split()[2:] if not word.startswith("-")]
    return _settings(words[0], prefix) if words else _configs(prefix)


def _configs(prefix: str) -> Sequence[str]:
    """Return the configs that come with jtrain, and the folders and YAML files of a path."""
    folder = prefix.rpartition("/")[0] + "/" * ("/" in prefix)
    found = [] if folder else list(shipped_configs())
    for path in Path(folder or ".").iterdir() if Path(folder or ".").is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            found.append(f"{folder}{path.name}/")
        elif path.suffix in YAML:
            found.append(f"{folder}{path.name}")
    return found


def _settings(config: str, prefix: str) -> Sequence[str]:
    """Return the keys of a config as `key=`, or the values that a key may have."""
    try:
        resolved = resolve(config)
    except UserError:  # a config that is still being written
        return []
    key, equals, _ = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in flatten(plain_values(resolved.config))]
    members = [x for schema in find_schemas(resolved.schema, key) for x in schema.members()]
    values = [str(value) for member in members for value in literal_choices(member.annotation)]
    return [f"{key}={value}" for value in dict.fromkeys(values)]


def _runs(**_: Any) -> Sequence[str]:
    """Return the names of the runs in runs/."""
    paths = Path("runs").rglob("config.yaml") if Path("runs").is_dir() else ()
    return [str(path.parent.relative_to("runs")) for path in paths]


_COMPLETERS = {
    "CONFIG": _config_and_settings,
    "KEY=VALUE": _config_and_settings,
    "KEY=VALUES": _config_and_settings,
    "RUN": _runs,
    "VERB": lambda **_: list(VERBS),
}
