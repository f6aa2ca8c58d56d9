"""A preset is a set of values; those said beside it win."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic_core import ArgsKwargs

from jtrain.errors import ConfigError


def with_preset(given: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """What was given to a values class, over the values of the preset that it names, if any.

    For a `@model_validator(mode="before")`: `given` is what pydantic hands to that.

    Raises:
        ConfigError: if there is no such preset, with the nearest name.
    """
    said = given.kwargs if isinstance(given, ArgsKwargs) else given
    name = said.get("preset", "none") if isinstance(said, Mapping) else "none"
    if name == "none" or not isinstance(name, str):
        return given
    if name not in presets:
        near = difflib.get_close_matches(name.lower(), presets, 1, cutoff=0.3)
        meant = f" Did you mean preset={near[0]}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}.{meant}")
    whole = {**presets[name], **said}
    return ArgsKwargs((), whole) if isinstance(given, ArgsKwargs) else whole
