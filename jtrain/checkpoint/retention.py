"""Checkpoint retention: keep the newest few, the best one, and the first of each n steps."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jtrain.checkpoint import layout
from jtrain.errors import CheckpointError, LossError

HIGH = re.compile(r"accuracy|correct|finished|auc|f1|f1_macro|f1_micro|r2|top_\d+")
"""Metrics of jtrain's losses and evaluations of which more is better."""


class BestMetric(NamedTuple):
    """Metric of the best checkpoint, lowest or highest."""

    end: Literal["lowest", "highest"]
    name: str

    @property
    def set_name(self) -> str:
        """The evaluation set of the metric; empty: the first one."""
        return self.name.rpartition("/")[0]

    @property
    def metric(self) -> str:
        """The name of the metric within its set."""
        return self.name.rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> "BestMetric | None":
        """Parse `loss`, `valid/accuracy`, `lowest loss` or `highest return`.

        A name alone is the lowest, of a metric in HIGH the highest. Return None for an empty text.
        """
        name = text.strip()
        first, _, rest = name.partition(" ")
        if first in ("lowest", "highest") and rest.strip():
            return cls(first, rest.strip())
        end = "highest" if HIGH.fullmatch(name.rpartition("/")[2]) else "lowest"
        return cls(end, name) if name else None


def find_best(directory: Path, steps: Sequence[int], goal: BestMetric) -> int | None:
    """Return the best of these steps by the values that were saved with them, if any has one."""
    values = {}
    for step in steps:
        with contextlib.suppress(CheckpointError):  # damaged, or deleted since the listing
            best = layout.read_record(directory, step)["best"]
            if best.get("name") == goal.name and best.get("value") is not None:
                values[step] = best["value"]
    return best_step(values, goal)


def best_step(values: Mapping[int, float], goal: BestMetric) -> int | None:
    """Return the step with the best value, the earliest of equals; NaN is never best."""
    for value in values.values():
        check_number(goal.name, value)
    sign = 1 if goal.end == "lowest" else -1
    ranked = [(sign * v, step) for step, v in values.items() if not math.isnan(v)]
    return min(ranked)[1] if ranked else None


def check_number(metric: str, value: Any) -> None:
    """Raise LossError if a metric that decides which step is best is an array."""
    if np.ndim(value):
        raise LossError(
            f"the metric {metric} is an array of {list(np.shape(value))}, of which none is best: "
            f"name a metric that is one number, such as loss."
        )


def steps_to_delete(
    steps: Sequence[int], keep: int, best: int | None, keep_every: int = 0
) -> list[int]:
    """Return the steps to delete, ascending.

    Args:
        steps: of all checkpoints.
        keep: number of newest ones that stay; 0: all stay.
        best: one that stays; None: none is best.
        keep_every: the first at or after each multiple of it stays; 0: none for that reason.
    """
    if not keep:
        return []
    retained = {*sorted(steps)[-keep:], best}
    if keep_every:
        first = {step // keep_every: step for step in sorted(steps, reverse=True)}
        retained |= {step for multiple, step in first.items() if multiple}
    return [step for step in sorted(steps) if step not in retained]


def count_saves(first: int, last: int, every: int) -> int:
    """Return the number of saves after step `first`: each `every` steps, and at the last step."""
    if last <= first:
        return 0
    return (last - 1) // every - first // every + 1 if every else 1
