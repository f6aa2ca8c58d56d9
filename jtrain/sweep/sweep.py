"""A sweep from its first member to its last, and what is left of it in runs/NAME."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jtrain.checkpoint.retention import BestMetric
from jtrain.errors import DONE, STOPPED, ConfigError
from jtrain.io.atomic_write import atomic_write
from jtrain.io.formatting import duration
from jtrain.io.private_files import private_files
from jtrain.sweep.grid import grid
from jtrain.sweep.machine import shares
from jtrain.sweep.members import SweepMember, check, keep_record, member, members, name_of
from jtrain.sweep.picture import svg
from jtrain.sweep.processes import MemberExit, MemberPool, only_one
from jtrain.sweep.results import MemberScore, groups, mean_curve, score
from jtrain.sweep.search import Search, corners, space
from jtrain.train.hooks.signals import Signals

CURVES = 4  # that are drawn


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """What a sweep came to."""

    name: str
    goal: BestMetric
    scores: Sequence[MemberScore]
    stopped: str
    """What stopped it before its end; empty if nothing did."""
    picture: Path | None


@private_files()
def sweep(
    config: Path,
    settings: Sequence[str],
    *,
    jobs: int = 1,
    metric: str = "",
    trials: int = 0,
    tell: Callable[[str], None],
) -> SweepResult:
    """Runs each member that is not done, `jobs` of them at a time.

    Args:
        config: the file that all of them are run from.
        settings: what was typed after it; see `jtrain.sweep.grid.grid`, and with trials
            `jtrain.sweep.search.space`.
        jobs: runs at a time, each on cores (and GPUs) of its own.
        metric: what they are compared by, `loss` or `highest accuracy`; empty: the config's
            checkpoint.best, or else the loss.
        trials: of a search by Optuna; 0 goes over a grid.
        tell: takes a line when a member begins or ends.

    Raises:
        ConfigError: for what no member could be run with; then none was begun.
    """
    name, settings = name_of(config, settings)
    parts = shares(jobs)
    if trials:
        searched, fixed = space(settings)
        tried = [member(name, "corner", point, fixed) for point in corners(searched)]
    else:
        searched, fixed, tried = {}, [], members(name, grid(settings))
    first = check(config, tried).config
    goal = _goal(metric, first.checkpoint.best)
    with only_one(name) as lock:
        if trials:
            search = Search(Path("runs") / name, searched, goal, seed=first.seed)
            plan = _searching(search, fixed, trials, goal)
        else:
            keep_record(name, config, tried, argv=[*settings])
            plan = _going_over(tried, config)
        tell(f"{name}: {plan.count} runs, {plan.before} of them before; {jobs} at a time")
        ends, stopped = _go(MemberPool(config, parts, lock), plan, jobs, tell)
    scores = _scores(plan.every(), ends, goal)
    return SweepResult(name, goal, scores, stopped, _draw(name, scores, goal))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be run."""

    count: int
    before: int  # done, or for a search begun, when this call began
    left: Iterator[SweepMember]
    every: Callable[[], Sequence[SweepMember]]
    note: Callable[[MemberExit], None]


def _going_over(every: Sequence[SweepMember], config: Path) -> _Plan:
    left = [one for one in every if not one.is_done(config)]
    before = len(every) - len(left)
    return _Plan(len(every), before, iter(left), lambda: every, lambda end: None)


def _searching(search: Search, fixed: Sequence[str], trials: int, goal: BestMetric) -> _Plan:
    every = lambda: search.all(fixed)
    note = lambda end: search.tell(end.member, score(end.member, goal).value)
    return _Plan(trials, len(every()), search.members(trials, fixed), every, note)


def _scores(
    every: Sequence[SweepMember], ends: Sequence[MemberExit], goal: BestMetric
) -> list[MemberScore]:
    messages = {end.member.name: end.message for end in ends}
    failed = {end.member.name for end in ends if end.code not in {DONE, STOPPED}}
    scores = [score(one, goal, messages.get(one.name, "")) for one in every]
    named = lambda s: dataclasses.replace(s, status="failed") if s.member.name in failed else s
    return [named(one) for one in scores]


def curves_of(scores: Sequence[MemberScore], goal: BestMetric) -> dict[str, list]:
    """The mean curves of the best few settings, by name; empty where there is nothing to see."""
    best = groups(scores, goal)[:CURVES]
    found = {group.name: mean_curve(scores, group, goal) for group in best}
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def _go(
    side: MemberPool, plan: _Plan, jobs: int, tell: Callable[[str], None]
) -> tuple[list[MemberExit], str]:
    """How each member ended, and what stopped the sweep."""
    ends: list[MemberExit] = []
    began = lambda one: tell(f"  begins   {one.label}")
    with Signals() as signals:
        for end in side.ends(plan.left, lambda: signals.why is not None, began):
            ends.append(end)
            if end.code != STOPPED:
                plan.note(end)
            tell(_said(end) + _left(ends, plan.count - plan.before - len(ends), jobs))
        return ends, signals.why or ""


def _said(end: MemberExit) -> str:
    how = {DONE: "done", STOPPED: "stopped"}.get(end.code, "failed")
    message = f"  {end.message.splitlines()[0]}" if end.message else ""
    return f"  {how:8} {end.member.label}  {duration(end.seconds)}{message}"


def _left(ends: Sequence[MemberExit], count: int, jobs: int) -> str:
    """How many runs have not ended yet, and how long they take if they are like those that did."""
    whole = [end.seconds for end in ends if end.code == DONE]
    if not count or not whole:
        return ""
    seconds = sum(whole) / len(whole) * count / min(jobs, count)
    return f"  ({count} to go, about {duration(seconds)})"


def _goal(metric: str, best: str) -> BestMetric:
    goal = BestMetric.parse(metric or best or "loss")
    if goal is None:
        raise ConfigError("--metric is empty; write --metric loss, or --metric 'highest accuracy'")
    return goal


def _draw(name: str, scores: Sequence[MemberScore], goal: BestMetric) -> Path | None:
    """runs/NAME/sweep.svg, if anything is done."""
    ranked = groups(scores, goal)
    if not ranked:
        return None
    path = Path("runs") / name / "sweep.svg"
    words = f"{goal.name} at the last evaluation, {goal.end} first"
    atomic_write(path, svg(name, words, ranked, curves_of(scores, goal)).encode())
    return path
