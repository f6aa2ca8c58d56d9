"""Metrics file, metrics.jsonl: the numbers that a run computed, none that depend on its speed.

Two runs that compute the same bits write the same file, even if one of them was killed and
resumed. The loop reports the numbers of all steps up to a checkpoint before saving it
(`Hook.settles`), so the rows that a resume drops are the rows that the resumed run writes again.
Hooks that write rows, such as evaluation, come before hooks that save.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.errors import LossError
from jtrain.io import jsonl
from jtrain.io.jsonl import JsonlWriter


class MetricsFile(Hook):
    """Hook that writes a row for steps `every`, 2 `every`, ... and the last.

    A row is `{"step": 20, "loss": 2.25, ...}`.

    Args:
        path: the file; recreated unless the run resumes.
        every: steps.
        resumed_at: step of the checkpoint that the run resumes from; None for a new run.

    Raises:
        CheckpointError: if the rows of the resumed run cannot be read.
    """

    last = True

    def __init__(
        self,
        path: Path | str,
        *,
        every: int,
        resumed_at: int | None = None,
    ):
        self.every = every
        self.rows = JsonlWriter(path, resumed_at=resumed_at)
        """The file."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a row."""
        self.row(step, "", numbers)

    def row(self, step: int, prefix: str, numbers: Mapping[str, Any]) -> None:
        """Write a row of results: prefix `valid` and `{"loss": ...}` give `valid/loss`."""
        named = {f"{prefix}/{name}" if prefix else name: x for name, x in numbers.items()}
        if "step" in named:
            raise LossError(
                'a metric is called "step", which is the key of each row of metrics.jsonl. Give it '
                'another name in the metrics that the loss returns, such as "position".'
            )
        self.rows.append({"step": step, **named})

    def sync(self) -> None:
        """Flush the rows to the disk, before a checkpoint, so that a power cut loses neither."""
        self.rows.sync()

    def close(self) -> None:
        """Close the file."""
        self.rows.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, in order, even while a run writes it; [] if missing."""
    return jsonl.read_rows(path)


def read_results(path: Path | str, prefix: str) -> dict[int, dict[str, float]]:
    """Return the numbers by step that `row` wrote with a prefix ("" for training), without it."""
    numbers_by_step: dict[int, dict[str, float]] = {}
    for row in read_metrics(path):
        step = row.pop("step")
        split = [(*name.rpartition("/"), x) for name, x in row.items()]
        numbers = {name: x for before, _, name, x in split if before == prefix}
        if numbers:
            numbers_by_step.setdefault(step, {}).update(numbers)
    return numbers_by_step


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
