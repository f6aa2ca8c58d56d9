"""A run's summary, and its series for charts."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, TypeAlias

from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.inspect.report.read_run import Row, RunStory, is_finite_number, to_number


def summarize_run(story: RunStory) -> dict[str, Any]:
    """Return status, step, losses, evaluations, rows or tokens per second, seconds and troubles."""
    sets = story.facts.get("sets")
    first = sets[0] if isinstance(sets, list) and sets and isinstance(sets[0], str) else "valid"
    losses = [row["loss"] for row in (*story.metrics, *story.steps[-1:]) if _has(row, "loss")]
    timed_rows = [row for row in story.speed if _has(row, "waiting")]
    rate = next((r for r in RATES if any(_has(row, r) for row in story.speed)), None)
    return {
        "run": str(story.path),
        "name": story.name,
        "status": story.status,
        "step": story.step,
        "steps": story.config.get("steps"),
        "loss": losses[-1] if losses else None,
        "validation": newest_validation(story, first),
        "best": _best(story, first),
        "rate": median(row[rate] for row in story.speed if _has(row, rate)) if rate else None,
        "rate_of": rate,
        "waiting": median(row["waiting"] for row in timed_rows) if timed_rows else None,
        "trained_seconds": max(
            (r["trained"] for r in story.speed if _has(r, "trained")), default=0
        ),
        "troubles": list(story.troubles),
    }


def newest_validation(story: RunStory, first: str = "valid") -> dict[str, float]:
    """Return the newest value of each evaluation metric by name, `valid/accuracy`.

    Metrics of the `first` set come first, starting with its loss. Arrays and row counts are
    omitted.
    """
    names = dict.fromkeys(name for row in story.metrics for name in row if "/" in name)
    found = {name: list(_values(story, name).values()) for name in names}
    newest = {n: values[-1] for n, values in found.items() if values and not n.endswith("/rows")}
    order = lambda name: (not name.startswith(f"{first}/"), not name.endswith("/loss"))
    return {name: newest[name] for name in sorted(newest, key=order)}


def _best(story: RunStory, first: str) -> dict[str, Any] | None:
    """Return the best evaluation by the run's checkpoint.best; by the loss if that is empty."""
    setting = story.config.get("checkpoint.best")
    goal = BestMetric.parse(setting if isinstance(setting, str) and setting else "loss")
    if goal is None:
        return None
    name = goal.name if "/" in goal.name else f"{first}/{goal.name}"
    values = _values(story, name)
    step = best_step(values, goal)
    return None if step is None else {"name": name, "value": values[step], "step": step}


def _values(story: RunStory, name: str) -> dict[int, float]:
    """Return the finite values of a metric by step."""
    return {row["step"]: float(row[name]) for row in story.metrics if _has(row, name)}


def _has(row: Row, key: str) -> bool:
    return isinstance(row.get(key), int | float) and is_finite_number(row[key])


RATES = ("tokens_per_second", "rows_per_second")
LEAF_KINDS = ("grad_norm", "grad_max", "ratio")
MOST = 1200  # points per line

Points: TypeAlias = dict[int, float]  # finite values by step
Charts: TypeAlias = dict[str, dict[str, Points]]  # lines by their names, by title


def metric_charts(stories: Sequence[RunStory], names: Sequence[str]) -> Charts:
    """Return the charts of metrics: `loss` with `valid/loss` first.

    A chart of one run has all sets of a metric. Several runs share a chart for each set.
    """
    found: Charts = {}
    for name, story in zip(names, stories, strict=True):
        for key, points in _curves(story).items():
            title, line = (key.rpartition("/")[2], key) if len(names) == 1 else (key, name)
            found.setdefault(title, {})[line] = thin(points)
    for name in [name for name in found if name.rpartition("/")[2] == "rows"]:
        del found[name]  # the number of evaluated rows, the same at every step
    if not any(any(points.values()) for points in found.get("skipped", {}).values()):
        found.pop("skipped", None)
    evaluated = lambda title: "/" in title or any("/" in line for line in found[title])
    loss = lambda title: title.rpartition("/")[2] == "loss"
    order = sorted(found, key=lambda title: (not loss(title), not evaluated(title), title))
    return {title: found[title] for title in order if any(found[title].values())}


def speed_charts(stories: Sequence[RunStory], names: Sequence[str]) -> Charts:
    """Return the charts of throughput and of the share of time spent waiting for data."""
    rate = next((r for r in RATES if any(r in row for s in stories for row in s.speed)), RATES[-1])
    titles = {rate: rate.replace("_", " "), "waiting": "share of time waiting for data"}
    found: Charts = {}
    for name, story in zip(names, stories, strict=True):
        for key, points in _scalars(story.speed).items():
            if key in titles:
                found.setdefault(titles[key], {})[name] = thin(points)
    return found


def leaf_charts(stories: Sequence[RunStory], names: Sequence[str]) -> Charts:
    """Return a chart for each leaf: norm and maximum of its gradient, and its update ratio."""
    found: Charts = {}
    for name, story in zip(names, stories, strict=True):
        for row in story.leaves:
            for kind in LEAF_KINDS:
                by_leaf = row.get(kind)
                for leaf, value in by_leaf.items() if isinstance(by_leaf, dict) else ():
                    if is_finite_number(value):
                        lines = found.setdefault(f"{kind} of {leaf}", {})
                        lines.setdefault(name, {})[row["step"]] = float(value)
    return {title: {n: thin(x) for n, x in lines.items()} for title, lines in found.items()}


def newest_matrices(story: RunStory) -> list[dict[str, Any]]:
    """Return the newest value of each array metric, as rows of numbers."""
    newest: dict[str, dict[str, Any]] = {}
    for row in story.metrics:
        for key, value in row.items():
            cells = _cells(value)
            if cells:
                newest[key] = {"name": key, "step": row["step"], "cells": cells}
    return list(newest.values())


def _curves(story: RunStory) -> dict[str, Points]:
    """Return the points of each metric, from steps.jsonl if that has more steps."""
    found = _scalars(story.metrics)
    for key, points in _scalars(story.steps).items():
        if len(points) > len(found.get(key, {})):
            found[key] = points
    return found


def thin(points: Points, most: int = MOST) -> Points:
    """Thin points to about `most`: keep the lowest and highest of each interval, so peaks stay."""
    if len(points) <= most:
        return points
    steps, size = list(points), math.ceil(2 * len(points) / most)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    value = lambda step: points[step]
    kept = [step for part in parts for step in sorted({min(part, key=value), max(part, key=value)})]
    return {step: points[step] for step in kept}


def _scalars(rows: Iterable[Row]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and is_finite_number(value):
                found.setdefault(key, {})[row["step"]] = float(value)
    return found


def _cells(value: Any) -> list[list[float | int | None]] | None:
    """Return a list of numbers, or of equally long lists of numbers, as rows; None otherwise."""
    if not isinstance(value, list) or not value:
        return None
    rows = value if all(isinstance(row, list) for row in value) else [value]
    wide = len(rows[0])
    if not wide or any(len(row) != wide for row in rows):
        return None
    if any(to_number(cell) is None for row in rows for cell in row):
        return None
    return [[to_number(x) if is_finite_number(x) else None for x in row] for row in rows]
