"""File evaluations.jsonl: results that another program than the training one has measured.

Its rows are those of metrics.jsonl, `{"step": 20, "valid/loss": 2.25}`, with the id of the run
under `run`, and the digest of the checkpoint's seal under `seal`: after a rollback the run saves
another checkpoint of the same step, whose row replaces the older one. The training process never
opens the file, so that neither waits for the other.
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
        self._path, self._run = directory / NAME, run
        self._rows = JsonlWriter(self._path, retain=lambda row: row.get("run") == run)
        self._seals = {row["step"]: row.get("seal") for row in complete_rows(self._path)}

    @property
    def newest(self) -> int | None:
        """Newest step that is evaluated; None if there is none."""
        return max(self._seals, default=None)

    def has(self, step: int, seal: str) -> bool:
        """Return whether the checkpoint of a step with this seal is evaluated."""
        return self._seals.get(step) == seal

    def append(self, step: int, seal: str, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the results of a step, by set, so that they survive a power cut."""
        if step in self._seals:
            self._rows.close()
            self._rows = JsonlWriter(self._path, retain=lambda row: row["step"] != step)
        named = {f"{name}/{key}": x for name, each in results.items() for key, x in each.items()}
        self._rows.append({"step": step, **named, "run": self._run, "seal": seal})
        self._rows.sync()
        self._seals[step] = seal

    def close(self) -> None:
        """Close the file."""
        self._rows.close()
