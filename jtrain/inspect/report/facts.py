"""A run's summary as JSON values: status, step, losses, evaluations, speed."""

from statistics import median
from typing import Any

from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.inspect.report.read_run import Row, RunStory, is_finite_number
from jtrain.inspect.report.series import RATES


def summarize_run(story: RunStory) -> dict[str, Any]:
    """Return status, step, losses, evaluations, rows or tokens per second, seconds and troubles."""
    sets = story.facts.get("sets")
    first = sets[0] if isinstance(sets, list) and sets and isinstance(sets[0], str) else "valid"
    valid = _values(story, f"{first}/loss")
    losses = [row["loss"] for row in (*story.metrics, *story.steps[-1:]) if _has(row, "loss")]
    timed_rows = [row for row in story.speed if _has(row, "waiting")]
    rate = next((r for r in RATES if any(_has(row, r) for row in story.speed)), None)
    best = min(valid.items(), key=lambda item: item[1], default=(None, None))
    return {
        "run": str(story.path),
        "name": story.name,
        "status": story.status,
        "step": story.step,
        "steps": story.config.get("steps"),
        "loss": losses[-1] if losses else None,
        "valid_loss": list(valid.values())[-1] if valid else None,
        "best_valid_loss": best[1],
        "best_step": best[0],
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
