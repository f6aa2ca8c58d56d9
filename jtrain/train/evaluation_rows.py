"""File evaluations.jsonl: results that another program than the training one has measured.

Its rows are those of metrics.jsonl, `{"step": 20, "valid/loss": 2.25}`, with the id of the run
under `run`. The training process never opens the file, so that neither waits for the other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.io.jsonl import JsonlWriter, complete_rows

NAME = "evaluations.jsonl"


class EvaluationRows:
    """Rows of the evaluated checkpoints of a run; one process writes them.

    Args:
        directory: of the run.
        run: id of the run; rows of another one, which was here before, are removed.

    Raises:
        CheckpointError: if the rows cannot be read, or the file cannot be written.
    """

    def __init__(self, directory: Path, run: str):
        self._run = run
        self._rows = JsonlWriter(directory / NAME, retain=lambda row: row.get("run") == run)
        self.steps = {row["step"] for row in complete_rows(directory / NAME)}
        """Steps that are evaluated."""

    def append(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the results of a step, by set, so that they survive a power cut."""
        named = {f"{name}/{key}": x for name, each in results.items() for key, x in each.items()}
        self._rows.append({"step": step, **named, "run": self._run})
        self._rows.sync()
        self.steps.add(step)

    def close(self) -> None:
        """Close the file."""
        self._rows.close()
