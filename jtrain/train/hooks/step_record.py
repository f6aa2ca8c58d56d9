"""Step record, steps.jsonl: the batch digest, the loss and the gradient norm of every step.

`jtrain replay` uses it to show that a step is reproduced to the bit, and `jtrain diff` to find
where two runs diverge: metrics.jsonl has only a row each `log.every` steps, and a loss does not
show whether the data differed.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.core.loop import FinishedSteps, Recorder
from jtrain.data.batches.fingerprint import digest_batch
from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, read_rows

_NAMES = ("loss", "grad_norm")


class StepRecord(NamedTuple):
    """Recorded numbers of a step."""

    loss: float
    grad_norm: float
    batch: int
    """Digest of the rows that the first process read; 0 if unknown."""

    def same(self, other: "StepRecord") -> bool:
        """Return whether loss and gradient norm have the same bits, also of a NaN."""
        bits = lambda record: struct.pack("<2d", record.loss, record.grad_norm)
        return bits(self) == bits(other)


class StepRecorder(Recorder):
    """Recorder of the loss, the gradient norm and the batch of every step.

    Args:
        rows: the file; a process without one only keeps `newest`.
    """

    def __init__(self, rows: JsonlWriter | None):
        self.rows = rows
        self.newest = 0
        """Digest of the batch of the last step that was written."""
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    def observe(self, first: int, batches: Sequence[Mapping[str, Any]]) -> None:
        """Take the batch of each step of the call after step `first`; on any thread."""
        digests = {first + i: digest_batch(batch) for i, batch in enumerate(batches, 1)}
        with self._lock:
            self._digests |= digests

    def on_steps(self, finished: FinishedSteps) -> None:
        """Write a row of these steps."""
        losses, norms = (finished.metrics[name].total.tolist() for name in _NAMES)
        with self._lock:
            batches = [self._digests.pop(step, 0) for step in finished.steps]
        self.newest = batches[-1]
        if self.rows:
            last = finished.steps[-1]
            self.rows.append({"step": last, "loss": losses, "grad_norm": norms, "batch": batches})


def read_step_records(path: Path) -> dict[int, StepRecord]:
    """Return the records by step; none without the file.

    Raises:
        CheckpointError: if a row is malformed.
    """
    records = {}
    for row in read_rows(path):
        try:
            columns = [*map(float, row["loss"])], [*map(float, row["grad_norm"])], row["batch"]
            each = list(zip(*columns, strict=True))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"the row of step {row['step']} in {path} is malformed: it needs lists of one "
                f"length under loss, grad_norm and batch. Put the file back as it was, or move it "
                f"away and compare without it: mv {path} {path}.old"
            ) from None
        first = row["step"] - len(each) + 1
        records |= {first + i: StepRecord(*numbers) for i, numbers in enumerate(each)}
    return records
