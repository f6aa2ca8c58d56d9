"""Metric history: the numbers of a run, in memory."""

from collections.abc import Mapping
from typing import Any

from jtrain.core.loop import Hook


class MetricHistory(Hook):
    """The numbers of steps `every`, 2 `every`, ... and the last, by name and step.

    `numbers["loss"][100]`

    Args:
        every: steps.
    """

    last = True

    def __init__(self, *, every: int = 1):
        self.every = every
        self.numbers: dict[str, dict[int, Any]] = {}
        """Numbers by name and step, in order."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step."""
        self.row(step, "", numbers)

    def row(self, step: int, prefix: str, numbers: Mapping[str, Any]) -> None:
        """Keep results: prefix `valid` and `{"loss": ...}` give `valid/loss`."""
        for name, number in numbers.items():
            name = f"{prefix}/{name}" if prefix else name
            self.numbers.setdefault(name, {})[step] = number

    def sync(self) -> None:
        """Do nothing: no file is written."""

    def close(self) -> None:
        """Do nothing: no file is written."""
