"""Resumed runs: the values that may differ from those of the stored run, and what changed since.

Anybody can edit config.yaml, but not a checkpoint without breaking its seal. The checkpoint
therefore defines the values of a run, and config.yaml only without a checkpoint.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.layout import ABOUT
from jtrain.config.dump import ABSENT, diff_configs, to_plain
from jtrain.config.resolve import resolve
from jtrain.config.schema import format_value
from jtrain.config.stored import load_values
from jtrain.config.top import BaseConfig
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.errors import ConfigError
from jtrain.io.disk_errors import may_pass
from jtrain.io.log import LOG
from jtrain.io.regular_files import check_no_links
from jtrain.train.code_digest import find_edited
from jtrain.train.longer_run import get_lengths, get_stored_lengths, keep_lengths
from jtrain.train.run_dir import CheckpointRecord, RunDir

C = TypeVar("C", bound=BaseConfig)

# Keys that change no number computed from a state, so a run may resume with other values; also
# `xla`, `steps_per_call` and `microbatches`, which change the last bits at most, as `parallel` does
# (a loss with rows_interact="slice" has other groups under both); also
# `guard`, so that a run stopped by a bad step can resume with another policy, and `name`, so that a
# copy of a run can resume under its own.
MAY_DIFFER = (
    "parallel",
    "steps_per_call",
    "microbatches",
    "workers",
    "checkpoint",
    "trackers",
    "sample",
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


def match_config(
    run_dir: RunDir, config: C, advice: str | Callable[[str], str]
) -> MatchedConfig[C]:
    """Match a config with the stored run, which resumes with its own values.

    Lengths may differ: a run may be trained longer.

    Args:
        advice: what to type if values differ that must not; or a function of the settings that give
            the run's values, for in config.yaml they may have been edited.

    Raises:
        ConfigError: if a value differs that must not, with each of them.
    """
    stored, notes = _load(run_dir, type(config))
    if stored is None:
        return MatchedConfig(config, None, [])
    config = keep_lengths(config, stored)
    changed = diff_configs(to_plain(stored), to_plain(config))
    may = {*MAY_DIFFER, *get_lengths(config)}
    other = [d for d in changed if not may & {d.key, d.key.split(".")[0]}]
    if other:
        copy = "" if stored.name == config.name else f"a copy of {stored.name}, "
        table = [
            f"  {d.key}: {format_value(d.before)} there, {format_value(d.after)} here\n"
            for d in other
        ]
        known = [d for d in other if d.before is not ABSENT]
        settings = " ".join(shlex.quote(f"{d.key}={format_value(d.before)}") for d in known)
        words = advice if isinstance(advice, str) else advice(settings)
        raise ConfigError(
            f"{run_dir.path} holds {copy}a run with other values:\n{''.join(table)}{words}"
        )
    lines = [f"{d.key}: {format_value(d.before)} -> {format_value(d.after)}" for d in changed]
    return MatchedConfig(config, stored, [*notes, *lines])


def load_stored(run_dir: RunDir, schema: type[C]) -> C | None:
    """Return the config of the stored run; None if nothing was ever trained in the directory.

    Raises:
        ConfigError: if it cannot be read, or does not fit the experiment's `schema`.
    """
    return _load(run_dir, schema)[0]


def _load(run_dir: RunDir, schema: type[C]) -> tuple[C | None, list[str]]:
    """Return the stored values, and lines about facts that had to be found elsewhere."""
    check_no_links(run_dir.path)
    newest = run_dir.newest_record(run_dir.owner())
    if newest is not None:
        about = run_dir.checkpoints / f"{newest.step}" / ABOUT
        values, dropped = load_values(newest.values, schema, about)
        notes = [f"{key} of the run is not a key of the experiment any more" for key in dropped]
        return values, [*_describe_damage(run_dir, newest), *notes]
    if not _was_started(run_dir):
        return None, []
    try:
        # With the given schema: the experiment need not be in a folder above the run.
        return resolve(run_dir.config, schema=schema).config, []
    except ConfigError as error:
        if may_pass(error):  # neither damaged nor to be moved away
            raise
        raise ConfigError(
            f"{error}\nNo checkpoint holds the values of {run_dir.path}. Fix that file, or move "
            f"the directory away to start over: mv {run_dir.path} {run_dir.path}-old"
        ) from None


def _was_started(run_dir: RunDir) -> bool:
    """Return whether anything is left of a run: run.json, whatever is in it, or metrics."""
    metrics = run_dir.metrics
    return os.path.lexists(run_dir.status) or (metrics.is_file() and metrics.stat().st_size > 0)


def _describe_damage(run_dir: RunDir, newest: CheckpointRecord) -> list[str]:
    if {"id", "status", "step"} <= run_dir.read_status().keys():
        return []
    trouble = "is damaged" if os.path.lexists(run_dir.status) else "is missing"
    return [f"{run_dir.status} {trouble}: checkpoint {newest.step} is used instead"]


# What a resumed run says.


def resume_advice(
    run_dir: RunDir, name: str, new_run: str, resume_command: str, settings: str
) -> str:
    """Return what to type if the stored run has other values.

    Args:
        new_run: how to start a new run.
        resume_command: how to resume the run, if it was given.
        settings: those that give the values of the run.
    """
    if resume_command:
        command = f"{resume_command}, with the values of that run"
    else:  # by its own name, since it may be a copy of another run
        command = f"{run_dir.resume_command} name={name} {settings}".rstrip()
    return f"Start a new run: {new_run}\nor resume that one: {command}"


def describe_edits(run_dir: RunDir, code: Mapping[str, str], new_run: str) -> list[str]:
    """Return a line if the code of a run was edited since its last start.

    Args:
        code: its digests now.
        new_run: how to start a new run.
    """
    edited = find_edited(run_dir.facts().get("code"), code)
    line = (
        f"the code of the run was edited since its last start: {', '.join(edited)}. Steps that "
        f"were taken are of the old code; to train the new code alone: {new_run}"
    )
    return [line] if edited else []


def log_changes(run_dir: RunDir, identity: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Log that a directory is a copy, and what variables of the compiler changed since."""
    facts = run_dir.facts()
    if facts.get("id", identity["id"]) != identity["id"]:
        LOG.info(
            f"{run_dir.path} was copied or moved from {facts.get('place', 'another place')}: it is "
            f"a separate run from now on"
        )
    known = facts.get("flags", environ)  # of a new run
    for name in VARIABLES:
        if known.get(name, "") != environ.get(name, ""):
            LOG.info(
                f"{name} was {known.get(name) or 'not set'}, and is "
                f"{environ.get(name) or 'not set'}: the last bits of results may differ"
            )


def warn_of_missing_checkpoint(
    run_dir: RunDir, checkpoints: CheckpointManager, start: int | None
) -> None:
    """Log that the checkpoint in run.json is missing, or that there was none before a kill."""
    facts = run_dir.facts()
    if start is None and facts.get("status") == "running" and not facts.get("step"):
        LOG.warning(f"{run_dir.path} was killed before its first checkpoint: it starts again")
    saved = facts.get("status") in {"running", "stopped", "done"}  # its step is a checkpoint's
    step = facts.get("step", 0) if saved else 0
    noticed = any(f"checkpoint {step} " in line for line in checkpoints.notices)
    if step > (start or 0) and not noticed:
        LOG.warning(f"checkpoint {step}, which {run_dir.status} names, is missing")
