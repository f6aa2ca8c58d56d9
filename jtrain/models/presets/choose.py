"""A preset is a set of values; those said beside it win."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic_core import ArgsKwargs

from jtrain.errors import ConfigError


def with_preset(given: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """What was given to a values class, over the values of the preset that it names, if any.

    For a `@model_validator(mode="before")`: `given` is what pydantic hands to that. In a config an
    unknown name is left for the check of its field, which knows the key and where it was said.

    Raises:
        ConfigError: if there is no such preset, with the nearest name.
    """
    called = isinstance(given, ArgsKwargs)
    said = given.kwargs or {} if called else given
    if not isinstance(said, Mapping):
        return given
    # JSON has lists alone, and a tuple's check is strict after this.
    said = {key: tuple(v) if isinstance(v, list) else v for key, v in said.items()}
    name = said.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        near = difflib.get_close_matches(name.lower(), presets, 1, cutoff=0.3)
        meant = f" Did you mean preset={near[0]}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}.{meant}")
    whole = {**(presets.get(name, {}) if isinstance(name, str) else {}), **said}
    return ArgsKwargs(given.args, whole) if called else whole
