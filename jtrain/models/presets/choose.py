"""Presets: defaults of a config, which values given beside the preset override."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic_core import ArgsKwargs

from jtrain.errors import ConfigError


def with_preset(given: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the values given to a config class, over those of the preset that they name.

    For a `@model_validator(mode="before")`: `given` is the argument of the validator. An unknown
    name in a config file is left to the check of its field, which knows the key and the source.

    Raises:
        ConfigError: with the nearest name, if the preset does not exist.
    """
    called = isinstance(given, ArgsKwargs)
    values = given.kwargs or {} if called else given
    if not isinstance(values, Mapping):
        return given
    # JSON has only lists, and the check of a tuple field is strict.
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    name = values.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        near = difflib.get_close_matches(name.lower(), presets, 1, cutoff=0.3)
        hint = f" Did you mean preset={near[0]}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}.{hint}")
    merged = {**(presets.get(name, {}) if isinstance(name, str) else {}), **values}
    return ArgsKwargs(given.args, merged) if called else merged
