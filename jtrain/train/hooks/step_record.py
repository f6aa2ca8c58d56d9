"""Step record, steps.jsonl: the batch digest, the loss and two norms of every step.

`jtrain replay` and `audit` use it to show that a step is reproduced, and `jtrain diff` to find
where two runs diverge: metrics.jsonl has only a row each `log.every` steps, and a loss does not
show whether the data differed. The norm of the update shows a change of the learning rate.
"""

import math
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.core.loop import FinishedSteps, Recorder
from jtrain.data.batches.fingerprint import digest_batch
from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, read_rows

NUMBERS = ("loss", "grad_norm", "update_norm")


class StepRecord(NamedTuple):
    """Recorded numbers of a step."""

    loss: float
    grad_norm: float
    update_norm: float
    batch: int
    """Digest of the rows that the first process read; 0 if unknown."""

    def same(self, other: "StepRecord") -> bool:
        """Return whether all numbers have the same bits, also of a NaN."""
        bits = lambda record: struct.pack("<3d", *record[:3])
        return bits(self) == bits(other)

    def distance(self, other: "StepRecord") -> tuple[float, str]:
        """Return the largest relative difference of a number, and the number's name."""
        pairs = zip(self[:3], other[:3], NUMBERS, strict=True)
        return max((_relative(here, there), name) for here, there, name in pairs)


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other))
    return apart if math.isfinite(apart) else math.inf


class StepRecorder(Recorder):
    """Recorder of the loss, the norms and the batch of every step.

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
        numbers = {name: finished.metrics[name].total.tolist() for name in NUMBERS}
        with self._lock:
            batches = [self._digests.pop(step, 0) for step in finished.steps]
        self.newest = batches[-1]
        if self.rows:
            last = finished.steps[-1]
            self.rows.append({"step": last, **numbers, "batch": batches})


def read_step_records(path: Path) -> dict[int, StepRecord]:
    """Return the records by step; none without the file.

    Raises:
        CheckpointError: if a row is malformed.
    """
    records = {}
    for row in read_rows(path):
        try:
            columns = ([*map(float, row[name])] for name in NUMBERS)
            each = list(zip(*columns, row["batch"], strict=True))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"the row of step {row['step']} in {path} is malformed: it needs lists of one "
                f"length under {', '.join(NUMBERS)} and batch. Put the file back as it was, or "
                f"move it away and compare without it: mv {path} {path}.old"
            ) from None
        first = row["step"] - len(each) + 1
        records |= {first + i: StepRecord(*numbers) for i, numbers in enumerate(each)}
    return records
