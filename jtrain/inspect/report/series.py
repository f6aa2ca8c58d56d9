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


Points: TypeAlias = list[list[float | int | None]]  # step, value; None if not finite
MOST = 1200  # points per line
RATES = ("tokens_per_second", "rows_per_second")
LEAF_KINDS = ("grad_norm", "grad_max", "ratio")


def metric_charts(stories: Sequence[RunStory]) -> list[dict[str, Any]]:
    """Return the charts of metrics for all runs: `loss` with `valid/loss` first."""
    found: dict[str, dict[str, list[Points]]] = {}
    for i, story in enumerate(stories):
        for key, points in _curves(story).items():
            name = key.rpartition("/")[2]
            lines = found.setdefault(name, {}).setdefault(key, [[] for _ in stories])
            lines[i] = thin(points)
    found.pop("skipped", None) if not _has_nonzero(found.get("skipped", {})) else None
    found.pop("rows", None)  # the number of evaluated rows, the same at every step
    validated = lambda name: any("/" in key for key in found[name])
    order = sorted(found, key=lambda name: (name != "loss", not validated(name), name))
    return [{"title": name, "lines": _lines(found[name])} for name in order]


def speed_charts(stories: Sequence[RunStory]) -> list[dict[str, Any]]:
    """Return the charts of throughput and of the share of time spent waiting for data."""
    rate = next((r for r in RATES if any(r in row for s in stories for row in s.speed)), RATES[-1])
    named = {rate.replace("_per_", " per "): rate, "share of time waiting for data": "waiting"}
    return [
        {
            "title": title.replace("_", " "),
            "lines": [{"name": key, "runs": [thin(_points(s.speed, key)) for s in stories]}],
            "zero": True,
        }
        for title, key in named.items()
        if any(_points(story.speed, key) for story in stories)
    ]


def trained_seconds(stories: Sequence[RunStory]) -> list[Points]:
    """Return the trained seconds by step for each run."""
    return [thin(_points(story.speed, "trained")) for story in stories]


def leaf_charts(stories: Sequence[RunStory]) -> list[dict[str, Any]]:
    """Return small charts for each leaf: norm and maximum of its gradient, and its update ratio."""
    found: dict[tuple[str, str], list[Points]] = {}
    for i, story in enumerate(stories):
        for row in story.leaves:
            for kind in LEAF_KINDS:
                by_leaf = row.get(kind)
                for leaf, value in by_leaf.items() if isinstance(by_leaf, dict) else ():
                    lines = found.setdefault((kind, leaf), [[] for _ in stories])
                    lines[i].append([row["step"], _finite(value)])
    return [
        {"kind": kind, "title": leaf, "runs": [thin(points) for points in runs]}
        for (kind, leaf), runs in found.items()
    ]


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
        if len(points) > len(found.get(key, [])):
            found[key] = points
    return found


def thin(points: Points, most: int = MOST) -> Points:
    """Thin points to about `most`: keep the lowest and highest of each interval, so peaks stay."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    thinned: Points = []
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        finite_points = [p for p in interval if p[1] is not None]
        ends = (
            {id(p): p for p in (min(finite_points, key=_value), max(finite_points, key=_value))}
            if finite_points
            else {}
        )
        thinned += sorted(ends.values(), key=lambda p: p[0] or 0) or interval[:1]
    return thinned


def _value(point: list[float | int | None]) -> float | int:
    assert point[1] is not None, "only finite values are compared"
    return point[1]


def _scalars(rows: Iterable[Row]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and to_number(value) is not None:
                found.setdefault(key, []).append([row["step"], _finite(value)])
    return found


def _points(rows: Iterable[Row], key: str) -> Points:
    return _scalars(rows).get(key, [])


def _finite(value: Any) -> float | None:
    return to_number(value) if is_finite_number(value) else None


def _lines(lines: dict[str, list[Points]]) -> list[dict[str, Any]]:
    return [{"name": key, "runs": lines[key]} for key in sorted(lines, key=lambda k: ("/" in k, k))]


def _has_nonzero(lines: dict[str, list[Points]]) -> bool:
    return any(point[1] for runs in lines.values() for points in runs for point in points)


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
    return [[_finite(cell) for cell in row] for row in rows]
