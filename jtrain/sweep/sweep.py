"""Sweep from its first member to its last: its runs, the value of each, and the mean over seeds."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint.retention import BestMetric
from jtrain.errors import DONE, STOPPED, ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.formatting import format_duration, format_number
from jtrain.sweep.members import (
    SweepMember,
    build_members,
    check_members,
    parse_grid,
    save_record,
    split_name,
)
from jtrain.sweep.pool import MemberExit, lock_sweep, run_members, split_machine
from jtrain.train.charts import Point
from jtrain.train.hooks.log import read_results
from jtrain.train.hooks.signals import Signals

SEED = "seed"


@dataclasses.dataclass(frozen=True)
class MemberScore:
    """A member, its status, and its metric at the last evaluation."""

    member: SweepMember
    status: str
    value: float | None = None
    step: int = 0
    message: str = ""


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """The members that differ only in their seed."""

    point: Mapping[str, str]
    """Their values by key, without the seed."""
    values: Mapping[str, float]
    """The metric by seed."""

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN or infinite where a seed is."""
        return _mean(self.values.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds (n - 1), NaN with a diverged one; None of one."""
        if len(self.values) < 2:
            return None
        with np.errstate(invalid="ignore"):
            return float(np.std(list(self.values.values()), ddof=1))

    @property
    def name(self) -> str:
        """`optimizer.lr=1e-4`."""
        return " ".join(f"{key}={value}" for key, value in self.point.items()) or "all"


def score_member(member: SweepMember, goal: BestMetric, message: str = "") -> MemberScore:
    """Return the score of a member, from its files.

    Raises:
        ConfigError: if it was evaluated and has no such metric.
    """
    curve = read_curve(member, goal)
    step, value = curve[-1] if curve else (0, None)
    status = member.directory.facts()
    state, why = status.get("status", ""), status.get("why", "")
    reason = message or (why if state in {"failed", "crashed"} else "")
    return MemberScore(member, state, value, int(step), reason)


def read_curve(member: SweepMember, goal: BestMetric) -> list[Point]:
    """Return the metric of a member at each evaluated step.

    `loss` is that of the first evaluation set, `NAME/loss` that of another set; without an
    evaluation set it is the training loss.

    Raises:
        ConfigError: if it was evaluated and has no such metric.
    """
    directory = member.directory
    sets = list(directory.facts().get("sets", ["valid"])) or [""]
    rows, metric = read_results(directory.metrics, goal.set_name or sets[0]), goal.metric
    names = {name for row in rows.values() for name in row}
    if rows and metric not in names:
        raise ConfigError(
            f"--metric {goal.name}: {member.name} has {', '.join(sorted(names - {'rows'}))}"
            f"{did_you_mean(metric, names)}"
        )
    return [(step, row[metric]) for step, row in rows.items() if metric in row]


def rank_groups(scores: Sequence[MemberScore], goal: BestMetric) -> list[SeedGroup]:
    """Return the settings with a finished member, the best first; NaN is the worst."""
    found: dict[tuple, dict[str, float]] = {}
    for each in scores:
        if each.status == "done" and each.value is not None:
            seed = each.member.point.get(SEED, "")
            point = tuple(_without_seed(each.member).items())
            found.setdefault(point, {})[seed] = each.value
    sign = 1 if goal.end == "lowest" else -1

    def rank(group: SeedGroup) -> float:
        return math.inf if math.isnan(group.mean) else sign * group.mean

    return sorted((SeedGroup(dict(key), values) for key, values in found.items()), key=rank)


def format_table(scores: Sequence[MemberScore], goal: BestMetric) -> list[str]:
    """Format the settings, the best first; then the unfinished members, with the reasons."""
    lines, best = [], rank_groups(scores, goal)
    if best:
        keys = list(best[0].point)
        seeded = any(len(group.values) > 1 for group in best)
        head = [*keys, goal.name, *(["spread", "seeds"] if seeded else [])]
        rows = [head, *(_row(group, keys, seeded) for group in best)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
        note = f"{goal.name} at the last evaluation, {goal.end} first"
        lines.append(note + ("; mean and standard deviation over the seeds" if seeded else ""))
    for each in scores:
        if each.status != "done":
            message = each.message or "not started" * (each.status == "")
            first, *rest = message.splitlines() or [""]
            lines.append(f"{each.status or '-':8} {each.member.label}  {first}".rstrip())
            lines += [f"         {line}" for line in rest]
    return [line.rstrip() for line in lines]


def as_json(name: str, scores: Sequence[MemberScore], goal: BestMetric) -> dict[str, Any]:
    """Return the results as plain values."""
    ranked = rank_groups(scores, goal)
    return {
        "name": name,
        "metric": goal.name,
        "best_is": goal.end,
        "groups": [
            {"point": dict(g.point), "mean": g.mean, "spread": g.spread, "seeds": dict(g.values)}
            for g in ranked
        ],
        "members": [
            {
                "name": s.member.name,
                "point": dict(s.member.point),
                "status": s.status,
                "value": s.value,
                "step": s.step,
                "message": s.message,
            }
            for s in scores
        ],
    }


def _without_seed(member: SweepMember) -> dict[str, str]:
    return {key: value for key, value in member.point.items() if key != SEED}


def _mean(values: Iterable[float]) -> float:
    """Return the mean; NaN or infinite where a value is."""
    with np.errstate(invalid="ignore"):
        return float(np.mean(list(values)))


def _row(group: SeedGroup, keys: Sequence[str], seeded: bool) -> list[str]:
    cells = [*(group.point[key] for key in keys), format_number(group.mean)]
    if not seeded:
        return cells
    each = "  ".join(f"{seed}: {format_number(value)}" for seed, value in group.values.items())
    return [*cells, "-" if group.spread is None else f"+- {format_number(group.spread)}", each]


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
            how = {DONE: "done", STOPPED: "stopped"}.get(end.code, "failed")
            message = f"  {end.message.splitlines()[0]}" if end.message else ""
            line = f"  {how:8} {end.member.label}  {format_duration(end.seconds)}{message}"
            tell(line + _time_left(ends, len(left) - len(ends), jobs))
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
