"""Match of a config with the run that is stored in its directory.

Anybody can edit config.yaml, but not a checkpoint without breaking its seal. The checkpoint
therefore defines the values of a run, and config.yaml only without a checkpoint.
"""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from jtrain.checkpoint.layout import ABOUT, list_named_steps
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.dump import ABSENT, Difference, diff_configs, to_plain
from jtrain.config.resolve import resolve
from jtrain.config.schema import format_value
from jtrain.config.stored import load_values, settings_for
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError
from jtrain.io.disk_errors import may_pass, unreachable_error
from jtrain.train.longer_run import get_lengths, get_stored_lengths, keep_lengths
from jtrain.train.run_record import (
    RUN_JSON,
    CheckpointRecord,
    read_newest_checkpoint,
    read_record,
)

C = TypeVar("C", bound=BaseConfig)
CONFIG, CHECKPOINTS, METRICS = "config.yaml", "checkpoints", "metrics.jsonl"

# Keys that change no number computed from a state, so a run may resume with other values; also
# `xla`, `steps_per_call` and `microbatches`, which change the last bits at most, as `parallel` does
# (a loss with couples="slice" has other groups under both); also
# `guard`, so that a run stopped by a bad step can resume with another policy, and `name`, so that a
# copy of a run can resume under its own.
MAY_DIFFER = (
    "parallel",
    "steps_per_call",
    "microbatches",
    "workers",
    "checkpoint",
    "trackers",
    "evaluate",
    "log",
    "guard",
    "checks",
    "xla",
    "name",
)


class MatchedConfig(NamedTuple, Generic[C]):
    """Config of a run that is new, or that resumes with its stored values."""

    config: C
    """The given values, with the stored length of each schedule that sets none."""
    stored: C | None
    """The stored values; None if nothing was ever trained in the directory."""
    changed: list[str]
    """Lines about allowed differences, and about facts that had to be found elsewhere."""

    @property
    def is_as_long(self) -> bool:
        """True if the run is stored, and `steps` and the lengths of its schedules are the same."""
        if self.stored is None:
            return False
        return get_lengths(self.config) == get_stored_lengths(self.config, self.stored)


def find_values(path: Path, schema: type[C], owner: RunIdentity | None) -> C | None:
    """Return the values of the run in a directory; None if nothing was ever trained there.

    Args:
        path: the run's directory.
        schema: the experiment's Config.
        owner: the run whose checkpoints count.

    Raises:
        ConfigError: if the values cannot be read, or one is not of its type in `schema`.
    """
    return _find(path, schema, read_newest_checkpoint(path / CHECKPOINTS, owner))[0]


def match_values(
    path: Path, config: C, owner: RunIdentity | None, advice: Callable[[str], str]
) -> MatchedConfig[C]:
    """Match a config with the stored run, which resumes with its own values.

    Lengths may differ: a run may be trained longer.

    Args:
        path: the run's directory.
        config: the given values.
        owner: the run whose checkpoints count.
        advice: `settings -> what to type` if values differ that must not. The settings, typed after
            config.yaml, give the run's values in case config.yaml was edited; mostly "".

    Raises:
        ConfigError: if a value differs that must not, with each of them.
    """
    sealed = read_newest_checkpoint(path / CHECKPOINTS, owner)
    stored, notes = _find(path, type(config), sealed)
    if stored is None:
        return MatchedConfig(config, None, [])
    config = keep_lengths(config, stored)
    lengths = get_lengths(config)
    changed = diff_configs(to_plain(stored), to_plain(config))
    may = {*MAY_DIFFER, *lengths}
    other = [d for d in changed if not may & {d.key, d.key.split(".")[0]}]
    if other:
        copy = "" if stored.name == config.name else f"a copy of {stored.name}, "
        raise ConfigError(
            f"{path} holds {copy}a run with other values:\n{_table(other)}\n"
            f"{advice(_settings(path, stored, other))}"
        )
    lines = [f"{d.key}: {format_value(d.before)} -> {format_value(d.after)}" for d in changed]
    return MatchedConfig(config, stored, [*notes, *lines])


def check_still_stored(path: Path, matched: MatchedConfig) -> None:
    """Raise UnreachableError if a run was stored when it was matched, and nothing of it is left."""
    is_left = _was_started(path) or list_named_steps(path / CHECKPOINTS)
    if matched.stored is not None and not is_left:
        raise unreachable_error(path, OSError(errno.ESTALE, "its files were there a moment ago"))


def _find(
    path: Path, schema: type[C], sealed: CheckpointRecord | None
) -> tuple[C | None, list[str]]:
    """Return the values, and lines about facts that had to be found elsewhere."""
    if sealed is not None:
        about = path / CHECKPOINTS / f"{sealed.step}" / ABOUT
        values, dropped = load_values(sealed.values, schema, about)
        notes = [f"{key} of the run is no key of the experiment any more" for key in dropped]
        return values, [*_lost(path / RUN_JSON, sealed.step), *notes]
    if not _was_started(path):
        return None, []
    try:
        # With the given schema: the experiment need not be in a folder above the run.
        return resolve(path / CONFIG, schema=schema).config, []
    except ConfigError as error:
        if may_pass(error):  # neither damaged nor to be moved away
            raise
        raise ConfigError(
            f"{error}\nNo checkpoint holds the values of {path}. Fix that file, or move the "
            f"directory away to start over: mv {path} {path}-old"
        ) from None


def _lost(run_json: Path, step: int) -> list[str]:
    """Return a line if run.json is missing or damaged."""
    trouble = read_record(run_json).trouble
    trouble = trouble if os.path.lexists(run_json) else "is missing"
    return [f"{run_json} {trouble}: checkpoint {step} is used instead"] if trouble else []


def _was_started(path: Path) -> bool:
    """Return whether anything is left of a run: run.json, whatever is in it, or metrics."""
    metrics = path / METRICS
    return os.path.lexists(path / RUN_JSON) or (metrics.is_file() and metrics.stat().st_size > 0)


def _settings(path: Path, stored: BaseConfig, other: Sequence[Difference]) -> str:
    """Return what is typed after config.yaml to get the values of the run."""
    settings = settings_for(path / CONFIG, stored, MAY_DIFFER)
    if settings is None:
        settings = [f"{d.key}={format_value(d.before)}" for d in other if d.before is not ABSENT]
    return " ".join(settings)


def _table(other: Sequence[Difference]) -> str:
    return "\n".join(
        f"  {d.key}: {format_value(d.before)} there, {format_value(d.after)} here" for d in other
    )
