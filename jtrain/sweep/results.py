"""What a sweep came to: each member's number, and of each setting the mean over its seeds."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import ConfigError
from jtrain.io.formatting import number
from jtrain.sweep.members import SweepMember
from jtrain.train.hooks.curve import Point
from jtrain.train.hooks.metrics import results

SEED = "seed"


@dataclasses.dataclass(frozen=True)
class MemberScore:
    """A member, how it stands, and its number at the last step at which it was measured."""

    member: SweepMember
    status: str
    value: float | None = None
    step: int = 0
    message: str = ""


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """The members that differ in their seed alone."""

    point: Mapping[str, str]
    """Their values by key, without the seed."""
    values: Mapping[str, float]
    """By seed."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds (n - 1); None for one seed."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def name(self) -> str:
        """`optimizer.lr=1e-4`."""
        return " ".join(f"{key}={value}" for key, value in self.point.items()) or "all"


def score(member: SweepMember, goal: BestMetric, message: str = "") -> MemberScore:
    """How a member stands, by what it has written.

    Raises:
        ConfigError: if it was measured and has no such metric.
    """
    curve = points(member, goal)
    step, value = curve[-1] if curve else (0, None)
    stands = member.directory.stands()
    status, why = stands.get("status", ""), stands.get("why", "")
    return MemberScore(
        member,
        status,
        value,
        int(step),
        message or (why if status in {"failed", "crashed"} else ""),
    )


def points(member: SweepMember, goal: BestMetric) -> list[Point]:
    """The number of a member at each step at which it was measured.

    `loss` is of the first evaluation set, `NAME/loss` of another one; where an experiment has no
    set, that of training.

    Raises:
        ConfigError: if it was measured and has no such metric.
    """
    directory = member.directory
    sets = list(directory.stands().get("sets", ["valid"])) or [""]
    where, _, metric = goal.name.rpartition("/")
    rows = results(directory.metrics, where or sets[0])
    names = {name for row in rows.values() for name in row}
    if rows and metric not in names:
        raise ConfigError(
            f"--metric {goal.name}: {member.name} gives {', '.join(sorted(names - {'rows'}))}"
            f"{did_you_mean(metric, names)}"
        )
    return [(step, row[metric]) for step, row in rows.items() if metric in row]


def groups(scores: Sequence[MemberScore], goal: BestMetric) -> list[SeedGroup]:
    """The settings of which a member is done, the best first; a NaN is the worst."""
    found: dict[tuple, dict[str, float]] = {}
    for one in scores:
        if one.status == "done" and one.value is not None:
            point = {k: v for k, v in one.member.point.items() if k != SEED}
            seed = one.member.point.get(SEED, "")
            found.setdefault(tuple(point.items()), {})[seed] = one.value
    sign = 1 if goal.end == "lowest" else -1
    worst = lambda group: math.inf if math.isnan(group.mean) else sign * group.mean
    return sorted((SeedGroup(dict(key), values) for key, values in found.items()), key=worst)


def table(scores: Sequence[MemberScore], goal: BestMetric) -> list[str]:
    """Lines for a person: settings, the best first; then what is not done, and why."""
    lines, best = [], groups(scores, goal)
    if best:
        keys = list(best[0].point)
        seeded = any(len(group.values) > 1 for group in best)
        head = [*keys, goal.name, *(["spread", "seeds"] if seeded else [])]
        rows = [head, *(_row(group, keys, seeded) for group in best)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
        note = f"{goal.name} at the last evaluation, {goal.end} first"
        lines.append(note + ("; mean and standard deviation over the seeds" if seeded else ""))
    for one in scores:
        if one.status != "done":
            first, *rest = (one.message or "not begun" * (one.status == "")).splitlines() or [""]
            lines.append(f"{one.status or '-':8} {one.member.label}  {first}".rstrip())
            lines += [f"         {line}" for line in rest]
    return [line.rstrip() for line in lines]


def as_json(name: str, scores: Sequence[MemberScore], goal: BestMetric) -> dict[str, Any]:
    """The same as plain values."""
    ranked = groups(scores, goal)
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


def mean_curve(scores: Sequence[MemberScore], group: SeedGroup, goal: BestMetric) -> list[Point]:
    """The mean over the seeds at each step at which all of them were measured."""
    curves = []
    for one in scores:
        point = {k: v for k, v in one.member.point.items() if k != SEED}
        if point == group.point and one.status == "done":
            curves.append(dict(points(one.member, goal)))
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in shared]


def _row(group: SeedGroup, keys: Sequence[str], seeded: bool) -> list[str]:
    cells = [*(group.point[key] for key in keys), number(group.mean)]
    if not seeded:
        return cells
    each = "  ".join(f"{seed}: {number(value)}" for seed, value in group.values.items())
    return [*cells, "-" if group.spread is None else f"+- {number(group.spread)}", each]
