"""A run's summary, and its series for charts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.inspect.report.read_run import Row, RunStory, finite_number

RATES = ("tokens_per_second", "rows_per_second")
MOST = 1200  # points per line

Points: TypeAlias = dict[int, float]  # finite values by step
Charts: TypeAlias = dict[str, dict[str, Points]]  # lines by their names, by title


def summarize_run(story: RunStory) -> dict[str, Any]:
    """Return status, step, losses, evaluations, rows or tokens per second, seconds and troubles."""
    sets = story.facts.get("sets")
    first = sets[0] if isinstance(sets, list) and sets and isinstance(sets[0], str) else "valid"
    speed, metrics = _scalars(story.speed), _scalars(story.metrics)
    losses = [
        *metrics.get("loss", {}).values(),
        *_scalars(story.steps[-1:]).get("loss", {}).values(),
    ]
    middle = lambda name: median(speed[name].values()) if name in speed else None
    rate = next((name for name in RATES if name in speed), None)
    return {
        "run": str(story.path),
        "name": story.name,
        "status": story.status,
        "step": story.step,
        "steps": story.config.get("steps"),
        "loss": losses[-1] if losses else None,
        "validation": _newest_validation(metrics, first),
        "best": _best(story, metrics, first),
        "rate": rate and middle(rate),
        "rate_of": rate,
        "waiting": middle("waiting"),
        "trained_seconds": max(speed.get("trained", {}).values(), default=0),
        "troubles": list(story.troubles),
    }


def _newest_validation(metrics: Mapping[str, Points], first: str) -> dict[str, float]:
    """Return the newest value of each evaluation metric by name, `valid/accuracy`.

    Metrics of the `first` set come first, starting with its loss. Row counts are omitted.
    """
    names = [name for name in metrics if "/" in name and not name.endswith("/rows")]
    order = lambda name: (not name.startswith(f"{first}/"), not name.endswith("/loss"))
    return {name: list(metrics[name].values())[-1] for name in sorted(names, key=order)}


def _best(story: RunStory, metrics: Mapping[str, Points], first: str) -> dict[str, Any] | None:
    """Return the best evaluation by the run's checkpoint.best; by the loss if that is empty."""
    setting = story.config.get("checkpoint.best")
    goal = BestMetric.parse(setting if isinstance(setting, str) and setting else "loss")
    if goal is None:
        return None
    name = goal.name if "/" in goal.name else f"{first}/{goal.name}"
    values = metrics.get(name, {})
    step = best_step(values, goal)
    return None if step is None else {"name": name, "value": values[step], "step": step}


def metric_charts(stories: Sequence[RunStory]) -> Charts:
    """Return the charts of metrics: `loss` with `valid/loss` first.

    A chart of one run has all sets of a metric. Several runs share a chart for each set.
    """
    found: Charts = {}
    for story in stories:
        for key, points in _curves(story).items():
            one = len(stories) == 1
            title, line = (key.rpartition("/")[2], key) if one else (key, story.name)
            found.setdefault(title, {})[line] = thin(points)
    for name in [name for name in found if name.rpartition("/")[2] == "rows"]:
        del found[name]  # the number of evaluated rows, the same at every step
    if not any(any(points.values()) for points in found.get("skipped", {}).values()):
        found.pop("skipped", None)
    evaluated = lambda title: "/" in title or any("/" in line for line in found[title])
    loss = lambda title: title.rpartition("/")[2] == "loss"
    order = sorted(found, key=lambda title: (not loss(title), not evaluated(title), title))
    return {title: found[title] for title in order if any(found[title].values())}


def speed_charts(stories: Sequence[RunStory]) -> Charts:
    """Return the charts of throughput and of the share of time spent waiting for data."""
    rate = next((r for r in RATES if any(r in row for s in stories for row in s.speed)), RATES[-1])
    titles = {rate: rate.replace("_", " "), "waiting": "share of time waiting for data"}
    found: Charts = {}
    for story in stories:
        for key, points in _scalars(story.speed).items():
            if key in titles:
                found.setdefault(titles[key], {})[story.name] = thin(points)
    return found


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
    """Return the finite numbers of some rows, by name and step."""
    found: dict[str, Points] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and (number := finite_number(value)) is not None:
                found.setdefault(key, {})[row["step"]] = number
    return found
