"""Sweep from its first member to its last, and its results in runs/NAME."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.checkpoint.retention import BestMetric
from jtrain.errors import DONE, STOPPED, ConfigError
from jtrain.io.formatting import format_duration
from jtrain.sweep.members import (
    SweepMember,
    build_members,
    check_members,
    parse_grid,
    save_record,
    split_name,
)
from jtrain.sweep.pool import MemberExit, lock_sweep, run_members, split_machine
from jtrain.sweep.results import MemberScore, score_member
from jtrain.train.hooks.signals import Signals


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Result of a sweep."""

    name: str
    goal: BestMetric
    scores: Sequence[MemberScore]
    stopped: str
    """The reason of an early stop; empty if the sweep is complete."""


def sweep(
    config: Path,
    settings: Sequence[str],
    *,
    jobs: int = 1,
    metric: str = "",
    tell: Callable[[str], None],
) -> SweepResult:
    """Run each unfinished member, `jobs` of them at a time.

    Args:
        config: the config file of all members.
        settings: the words after it; see `parse_grid`.
        jobs: concurrent runs, each on its own cores and GPUs.
        metric: the metric to rank by, `loss` or `highest accuracy`; empty: the config's
            checkpoint.best, or else the loss.
        tell: takes a line when a member starts or ends.

    Raises:
        ConfigError: if a member is invalid; then no member was started.
    """
    name, settings = split_name(config, settings)
    shares = split_machine(jobs)
    members = build_members(name, parse_grid(settings))
    goal = _goal(metric, check_members(config, members).config.checkpoint.best)
    with lock_sweep(name) as lock, Signals() as signals:
        save_record(name, config, members, argv=[*settings])
        left = [member for member in members if not member.is_done(config)]
        earlier = len(members) - len(left)
        tell(f"{name}: {len(members)} runs, {earlier} of them earlier; {jobs} at a time")
        ends: list[MemberExit] = []
        for end in run_members(
            config,
            left,
            shares,
            lock=lock,
            stopped=lambda: signals.why is not None,
            begins=lambda member: tell(f"  begins   {member.label}"),
        ):
            ends.append(end)
            tell(_end_line(end) + _time_left(ends, len(left) - len(ends), jobs))
        return SweepResult(name, goal, _scores(members, ends, goal), signals.why or "")


def _scores(
    members: Sequence[SweepMember], ends: Sequence[MemberExit], goal: BestMetric
) -> list[MemberScore]:
    messages = {end.member.name: end.message for end in ends}
    failed = {end.member.name for end in ends if end.code not in {DONE, STOPPED}}
    scores = [score_member(member, goal, messages.get(member.name, "")) for member in members]
    return [
        dataclasses.replace(score, status="failed") if score.member.name in failed else score
        for score in scores
    ]


def _end_line(end: MemberExit) -> str:
    how = {DONE: "done", STOPPED: "stopped"}.get(end.code, "failed")
    message = f"  {end.message.splitlines()[0]}" if end.message else ""
    return f"  {how:8} {end.member.label}  {format_duration(end.seconds)}{message}"


def _time_left(ends: Sequence[MemberExit], count: int, jobs: int) -> str:
    """Return the number of unfinished runs, and an estimate of their time from the others."""
    finished = [end.seconds for end in ends if end.code == DONE]
    if not count or not finished:
        return ""
    seconds = sum(finished) / len(finished) * count / min(jobs, count)
    return f"  ({count} to go, about {format_duration(seconds)})"


def _goal(metric: str, best: str) -> BestMetric:
    goal = BestMetric.parse(metric or best or "loss")
    if goal is None:
        raise ConfigError("--metric is empty; write --metric loss, or --metric 'highest accuracy'")
    return goal
