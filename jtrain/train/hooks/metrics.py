"""Writes metrics.jsonl: what was computed in a run, and nothing that depends on its speed.

Two runs that compute the same bits write the same file, also when one of them was killed and
resumed. A loop tells the numbers of all steps up to a checkpoint before it is made
(`Hook.settles`), so what a resume drops is exactly what the resumed run writes again. What writes
rows at a step, evaluation for one, comes before what saves in the list of hooks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.errors import LossError
from jtrain.io import jsonl
from jtrain.io.jsonl import JsonlWriter


class Metrics(Hook):
    """A row for each step `every`, 2 `every`, ... and the last: `{"step": 20, "loss": 2.25, ...}`.

    Args:
        path: the file; it is begun anew unless the run resumes.
        every: steps.
        resumed_at: the step of the checkpoint that the run goes on from; None at its beginning.
        lost: as `JsonlWriter` takes it.

    Raises:
        CheckpointError: if the rows of the run that is resumed cannot be read.
    """

    last = True

    def __init__(
        self,
        path: Path | str,
        *,
        every: int,
        resumed_at: int | None = None,
        lost: Callable[[str], object] = lambda line: None,
    ):
        self.every = every
        self.rows = JsonlWriter(path, resumed_at=resumed_at, lost=lost)
        """The file."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a row."""
        self.row(step, "", numbers)

    def row(self, step: int, prefix: str, numbers: Mapping[str, Any]) -> None:
        """Writes a row of results: of prefix `valid` and `{"loss": ...}`, `valid/loss`."""
        named = {f"{prefix}/{name}" if prefix else name: x for name, x in numbers.items()}
        if "step" in named:
            raise LossError(
                'a metric is called "step", which is what each row of metrics.jsonl is found by. '
                'Give it another name in the metrics that the loss returns, "position" say.'
            )
        self.rows.append({"step": step, **named})

    def sync(self) -> None:
        """Forces the rows to the disk; before a checkpoint, so that no power cut parts the two."""
        self.rows.sync()

    def close(self) -> None:
        """Closes the file."""
        self.rows.close()


def read(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a metrics file, in order, also while a run writes it; none if it is not there."""
    return jsonl.read_rows(path)


def results(path: Path | str, prefix: str) -> dict[int, dict[str, float]]:
    """Of each step the numbers written by `row` with `prefix`, without it; "" for training's."""
    found: dict[int, dict[str, float]] = {}
    for row in read(path):
        step = row.pop("step")
        split = [(*name.rpartition("/"), x) for name, x in row.items()]
        numbers = {name: x for before, _, name, x in split if before == prefix}
        if numbers:
            found.setdefault(step, {}).update(numbers)
    return found
