"""Values of a run: those that its newest checkpoint has sealed, compared with what is asked for.

config.yaml can be edited by anybody; a checkpoint cannot, without its seal breaking. So it is the
checkpoint that says what a run is of, and config.yaml only where there is no checkpoint.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jtrain.checkpoint.layout import ABOUT
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.command_line import spell
from jtrain.config.dump import ABSENT, Difference, differences, to_plain
from jtrain.config.durations import durations
from jtrain.config.resolve import resolve
from jtrain.config.stored import load_values, settings_for
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError
from jtrain.train.run_record import IDENTITY, RUN_JSON, CheckpointRecord, newest_sealed, read_record

C = TypeVar("C", bound=BaseConfig)
CONFIG, CHECKPOINTS, METRICS = "config.yaml", "checkpoints", "metrics.jsonl"

# What changes no number that a run computes from its state on, so a run may go on with others; and
# what it does about a bad step, for a run that one has stopped goes on with another answer.
# A copy of a run goes on under its own name.
MAY_DIFFER = (
    "parallel",
    "workers",
    "checkpoint",
    "trackers",
    "evaluate",
    "log",
    "guard",
    "checks",
    "name",
)


def find_values(path: Path, schema: type[C], owner: RunIdentity | None) -> C | None:
    """Return the values of the run in a directory; None if nothing was ever trained there.

    Args:
        path: the run's directory.
        schema: the experiment's Config.
        owner: the run, whose checkpoints count.

    Raises:
        ConfigError: if they cannot be had, or a value is not of its type in `schema`.
    """
    return _find(path, schema, newest_sealed(path / CHECKPOINTS, owner))[0]


def check_values(
    path: Path,
    config: BaseConfig,
    owner: RunIdentity | None,
    advice: Callable[[str], str],
    also: Iterable[str] = (),
) -> list[str]:
    """Make sure that a run goes on with its own values.

    Args:
        path: the run's directory.
        config: the values that are asked for.
        owner: the run, whose checkpoints count.
        advice: what to type where values differ that may not. It is given the settings that are
            typed after config.yaml to have the run's values, for config.yaml may have been edited:
            mostly none.
        also: dotted keys that may differ beside MAY_DIFFER.

    Returns:
        Lines about what differs and may, and about what of the run had to be found elsewhere.

    Raises:
        ConfigError: if another value differs, with each of them.
    """
    sealed = newest_sealed(path / CHECKPOINTS, owner)
    stored, notes = _find(path, type(config), sealed)
    if stored is None:
        return []
    changed = differences(to_plain(stored), to_plain(config))
    may = {*MAY_DIFFER, *also}
    other = [d for d in changed if not may & {d.key, d.key.split(".")[0]}]
    if sealed is not None and sealed.values is None:
        known = {d.key for d in other} | {*also}
        other += [d for d in _since(sealed.counted, config) if d.key not in known]
    if other:
        copy = "" if stored.name == config.name else f"a copy of {stored.name}, "
        raise ConfigError(
            f"{path} holds {copy}a run of other values:\n{_table(other)}\n"
            f"{advice(_settings(path, stored, other))}"
        )
    return [*notes, *(f"{d.key}: {spell(d.before)} -> {spell(d.after)}" for d in changed)]


def check_about(
    about: Mapping[str, Any], config: BaseConfig, where: Path, advice: str, also: Iterable[str] = ()
) -> None:
    """Make sure that a checkpoint from before there were ids is of a run of these values.

    One with an id is known by that.

    Args:
        about: what the checkpoint says of itself.
        config: the values that are asked for.
        where: the checkpoint.
        advice: what to type.
        also: dotted keys that may differ beside MAY_DIFFER.

    Raises:
        ConfigError: if a value differs that may not, with each of them.
    """
    other = [d for d in _since(about.get("config"), config) if d.key not in {*also}]
    if IDENTITY not in about and other:
        raise ConfigError(f"{where} is of a run of other values:\n{_table(other)}\n{advice}")


def _find(
    path: Path, schema: type[C], sealed: CheckpointRecord | None
) -> tuple[C | None, list[str]]:
    """The values, and lines about what of the run had to be found elsewhere."""
    file, about = path / CONFIG, path / CHECKPOINTS / f"{sealed.step if sealed else ''}" / ABOUT
    if sealed is None and not _was_begun(path):
        return None, []
    notes = _lost(path / RUN_JSON, sealed.step) if sealed else []
    if sealed is not None and sealed.values is not None:
        values, dropped = load_values(sealed.values, schema, about)
        notes += [f"{key} of the run is no key of the experiment any more" for key in dropped]
        return values, notes
    try:
        # By the schema at hand: the experiment need not lie above the place where the run does.
        return resolve(file, schema=schema).config, notes
    except ConfigError as error:
        if sealed is None or sealed.counted is None:
            raise ConfigError(
                f"{error}\nNo checkpoint says what the values of {path} are. Mend that file, or "
                f"move the directory away to begin anew: mv {path} {path}-old"
            ) from None
    return load_values(sealed.counted, schema, about)[0], notes


def _lost(run_json: Path, step: int) -> list[str]:
    """A line where run.json does not say what it should."""
    trouble = read_record(run_json).trouble
    trouble = trouble if os.path.lexists(run_json) else "is gone"
    return [f"{run_json} {trouble}: checkpoint {step} says what the run is"] if trouble else []


def _was_begun(path: Path) -> bool:
    """Whether anything is left of a run: run.json, whatever is in it, or numbers."""
    metrics = path / METRICS
    return os.path.lexists(path / RUN_JSON) or (metrics.is_file() and metrics.stat().st_size > 0)


def _since(counted: Any, config: BaseConfig) -> Sequence[Difference]:
    """What differs from the values in a checkpoint from before there were ids, and may not.

    It has durations in steps, and none of the keys that the schema has gained since.
    """
    if not isinstance(counted, dict):
        return []
    lengths = durations(config)
    matters = lambda key: key.split(".")[0] not in MAY_DIFFER and key not in lengths
    changed = differences(counted, to_plain(config))
    return [d for d in changed if matters(d.key) and ABSENT not in (d.before, d.after)]


def _settings(path: Path, stored: BaseConfig, other: Sequence[Difference]) -> str:
    """What is typed after config.yaml to have the values of the run."""
    settings = settings_for(path / CONFIG, stored, MAY_DIFFER)
    if settings is None:
        settings = [f"{d.key}={spell(d.before)}" for d in other if d.before is not ABSENT]
    return " ".join(settings)


def _table(other: Sequence[Difference]) -> str:
    return "\n".join(f"  {d.key}: {spell(d.before)} there, {spell(d.after)} here" for d in other)
