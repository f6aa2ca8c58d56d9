"""Longer runs: a finished run is trained for more steps, and its schedules keep their length.

A schedule keeps the length that it was written for, unless its own `steps` set another. The earlier
lengths of a run are stored in its checkpoints, so that the values of each of its steps are known.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jtrain.config.dump import plain_values
from jtrain.config.durations import find_durations, find_own_steps
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError
from jtrain.io.log import LOG

C = TypeVar("C", bound=BaseConfig)


class LengthChange(NamedTuple):
    """Change of a run's lengths after a step."""

    step: int
    """The last step under the old lengths."""
    before: Mapping[str, Any]
    """The old lengths by key: `steps`, and those of schedules."""


def get_lengths(config: BaseConfig) -> dict[str, Any]:
    """Return `steps` and the own length of each schedule, by dotted key."""
    own = {f"{key}.steps": part.steps for key, part in find_own_steps(config).items()}
    return {"steps": config.steps, **own}


def get_stored_lengths(config: BaseConfig, stored: Any) -> dict[str, Any]:
    """Return the lengths of a stored run, at the keys of `config`; 0 where it has none.

    Args:
        stored: its config, or its config as JSON. An optimizer that was given in code is read back
            as plain values.
    """
    values = plain_values(stored)
    return {key: _at(values, key) for key in get_lengths(config)}


def get_schedule_lengths(config: BaseConfig) -> dict[str, Any]:
    """Return the length of each schedule in steps, by dotted key."""
    return {key: part.steps or config.steps for key, part in find_own_steps(config).items()}


def keep_lengths(config: C, stored: BaseConfig | None) -> C:
    """Return `config` with the stored run's length for each schedule that sets none.

    A schedule of the stored run that sets no length is as long as that run. If both runs are
    equally long, such a schedule is left unset.
    """
    if stored is None:
        return config
    known = get_stored_lengths(config, stored)
    longer = config.steps != stored.steps
    unset = [key for key, steps in get_lengths(config).items() if steps == 0]
    kept = {key: known[key] or stored.steps for key in unset if known[key] or longer}
    return _with_lengths(config, kept)


def find_length_changes(
    config: BaseConfig, start: int, about: Mapping[str, Any]
) -> list[LengthChange]:
    """Return the length changes of a run that resumes from a checkpoint.

    Args:
        config: its values from now on, with durations in steps.
    """
    changed = [LengthChange(each["step"], each["before"]) for each in about.get("extended", [])]
    before = get_stored_lengths(config, about.get("config", {}))
    if before["steps"] and before != get_lengths(config):
        changed.append(LengthChange(start, before))
    return changed


def config_at(config: C, changed: Sequence[LengthChange], step: int) -> C:
    """Return the values with which a step was taken; the first step is 1.

    Args:
        config: the run's values now, with durations as they were written: 5 % of another length is
            another warmup.
    """
    before = next((change.before for change in changed if step <= change.step), {})
    return _with_lengths(config, before)


def check_rate(config: BaseConfig) -> None:
    """Raise ConfigError if the learning rate is 0 for all steps after the end of its schedule.

    Args:
        config: with durations in steps.
    """
    part = find_own_steps(config).get("optimizer.schedule")
    if part is None or not part.steps or part.steps >= config.steps:
        return
    rate = _rate(config)
    if rate and rate(part.steps) == rate(config.steps - 1) == 0:
        raise ConfigError(
            f"optimizer.schedule {part.kind} is made for {part.steps} steps and ends at a learning "
            f"rate of 0, so that the steps from there to {config.steps} would change nothing. "
            f"Stretch it over the run: optimizer.schedule.steps=100%"
        )


def settings_to_extend(config: BaseConfig, steps: int) -> list[str]:
    """Return the settings that train a finished run to `steps`.

    Args:
        config: of the run, with durations as written.
    """
    rate = None if find_durations(config) else _rate(config)
    ends_at_zero = rate is not None and rate(config.steps - 1) == 0
    return [f"steps={steps}", *(["optimizer.schedule.steps=100%"] if ends_at_zero else [])]


def log_length_change(config: BaseConfig, change: LengthChange) -> None:
    """Log a line about each schedule after a change of length.

    Args:
        config: the values after the change, with durations in steps.
    """
    before = get_schedule_lengths(_with_lengths(config, change.before))
    for key, steps in get_schedule_lengths(config).items():
        stretch = f". {key}.steps=100% stretches it over the run" * (steps != config.steps)
        if steps != before[key]:
            LOG.info(f"{key} is stretched from {before[key]} to {steps} steps")
        else:
            LOG.info(f"{key} keeps the {steps} steps that it was made for{stretch}")


def _rate(config: Any) -> Any:
    """Return the learning rate as a function of the step, from 0 on; None if unknown."""
    return config.optimizer.learning_rate(config.steps)


def _at(values: Any, key: str) -> Any:
    try:
        for name in key.split("."):
            values = values[int(name) if isinstance(values, list) else name]
    except (LookupError, TypeError, ValueError):
        return 0
    return values


def _with_lengths(config: C, lengths: Mapping[str, Any]) -> C:
    for key in get_lengths(config).keys() & lengths.keys():
        config = _replaced(config, key.split("."), lengths[key])
    return config


def _replaced(value: Any, keys: Sequence[str], new: Any) -> Any:
    if not keys:
        return new
    first, *rest = keys
    if isinstance(value, tuple | list):
        i = int(first)
        return type(value)([*value[:i], _replaced(value[i], rest, new), *value[i + 1 :]])
    if isinstance(value, Mapping):
        return {**value, first: _replaced(value[first], rest, new)}
    return dataclasses.replace(value, **{first: _replaced(getattr(value, first), rest, new)})
