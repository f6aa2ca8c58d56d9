"""Sweep from its first member to its last, and its results in runs/NAME."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.top import RUNS
from jtrain.errors import DONE, STOPPED, ConfigError
from jtrain.io.formatting import format_duration
from jtrain.sweep.grid import parse_grid
from jtrain.sweep.machine import split_machine
from jtrain.sweep.members import (
    SweepMember,
    build_member,
    build_members,
    check_members,
    save_record,
    split_name,
)
from jtrain.sweep.processes import MemberExit, MemberPool, lock_sweep
from jtrain.sweep.results import MemberScore, mean_curve, rank_groups, score_member
from jtrain.sweep.search import Search, corners, parse_space
from jtrain.train.hooks.signals import Signals

CURVES = 4  # curves in the terminal


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
    trials: int = 0,
    tell: Callable[[str], None],
) -> SweepResult:
    """Run each unfinished member, `jobs` of them at a time.

    Args:
        config: the config file of all members.
        settings: the words after it; see `jtrain.sweep.grid.parse_grid`, and with trials
            `jtrain.sweep.search.parse_space`.
        jobs: concurrent runs, each on its own cores and GPUs.
        metric: the metric to rank by, `loss` or `highest accuracy`; empty: the config's
            checkpoint.best, or else the loss.
        trials: trials of a search by Optuna; 0: a grid.
        tell: takes a line when a member starts or ends.

    Raises:
        ConfigError: if a member is invalid; then no member was started.
    """
    name, settings = split_name(config, settings)
    machine_shares = split_machine(jobs)
    if trials:
        searched, fixed = parse_space(settings)
        candidates = [build_member(name, "corner", point, fixed) for point in corners(searched)]
    else:
        searched, fixed, candidates = {}, [], build_members(name, parse_grid(settings))
    first = check_members(config, candidates).config
    goal = _goal(metric, first.checkpoint.best)
    with lock_sweep(name) as lock:
        if trials:
            search = Search(RUNS / name, searched, goal, seed=first.seed)
            plan = _search_plan(search, fixed, trials, goal)
        else:
            save_record(name, config, candidates, argv=[*settings])
            plan = _grid_plan(candidates, config)
        tell(f"{name}: {plan.count} runs, {plan.before} of them earlier; {jobs} at a time")
        ends, stopped = _run(MemberPool(config, machine_shares, lock), plan, jobs, tell)
    scores = _scores(plan.every(), ends, goal)
    return SweepResult(name, goal, scores, stopped)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The members to run."""

    count: int
    before: int  # finished members, or the trials of a search, before this call
    left: Iterator[SweepMember]
    every: Callable[[], Sequence[SweepMember]]
    note: Callable[[MemberExit], None]


def _grid_plan(every: Sequence[SweepMember], config: Path) -> _Plan:
    left = [one for one in every if not one.is_done(config)]
    before = len(every) - len(left)
    return _Plan(len(every), before, iter(left), lambda: every, lambda end: None)


def _search_plan(search: Search, fixed: Sequence[str], trials: int, goal: BestMetric) -> _Plan:
    def every() -> Sequence[SweepMember]:
        return search.all(fixed)

    def note(end: MemberExit) -> None:
        done = end.code == DONE  # the last evaluation before a failure is no result of a trial
        search.tell(end.member, score_member(end.member, goal).value if done else None)

    return _Plan(trials, len(every()), search.members(trials, fixed), every, note)


def _scores(
    every: Sequence[SweepMember], ends: Sequence[MemberExit], goal: BestMetric
) -> list[MemberScore]:
    messages = {end.member.name: end.message for end in ends}
    failed = {end.member.name for end in ends if end.code not in {DONE, STOPPED}}
    scores = [score_member(one, goal, messages.get(one.name, "")) for one in every]
    return [
        dataclasses.replace(each, status="failed") if each.member.name in failed else each
        for each in scores
    ]


def mean_curves(scores: Sequence[MemberScore], goal: BestMetric) -> dict[str, list]:
    """Return the mean curves of the best settings, by name; empty without any curve."""
    best = rank_groups(scores, goal)[:CURVES]
    found = {group.name: mean_curve(scores, group, goal) for group in best}
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def _run(
    pool: MemberPool, plan: _Plan, jobs: int, tell: Callable[[str], None]
) -> tuple[list[MemberExit], str]:
    """Run the plan; return the end of each member, and the reason of an early stop."""
    ends: list[MemberExit] = []

    def started(one: SweepMember) -> None:
        tell(f"  begins   {one.label}")

    with Signals() as signals:
        for end in pool.ends(plan.left, lambda: signals.why is not None, started):
            ends.append(end)
            if end.code != STOPPED:
                plan.note(end)
            remaining = plan.count - plan.before - len(ends)
            tell(_end_line(end) + _time_left(ends, remaining, jobs))
        return ends, signals.why or ""


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
