"""Step record, steps.jsonl: the batch digest, the loss and the gradient norm of every step.

`jtrain replay` uses it to show that a step is reproduced to the bit, and `jtrain diff` to find
where two runs diverge: metrics.jsonl has only a row each `log.every` steps, and a loss does not
show whether the data differed.
"""

import collections
import itertools
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.loop import IN_FLIGHT, StatelessHook
from jtrain.core.types import Metrics
from jtrain.data.batches.fingerprint import digest_batch
from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, read_rows
from jtrain.train.program import join_calls, select

ROW = 64  # calls per row of the file
_NAMES = ("loss", "grad_norm")


class StepRecord(NamedTuple):
    """Recorded numbers of a step."""

    loss: float
    grad_norm: float
    batch: int
    """Digest of the rows that the first process read; 0 if unknown."""

    def same(self, other: "StepRecord") -> bool:
        """Return whether loss and gradient norm have the same bits, also of a NaN."""
        return _bits(self.loss, self.grad_norm) == _bits(other.loss, other.grad_norm)


class StepRecorder(StatelessHook):
    """Hook that keeps the numbers of each call on the devices and writes them some calls later.

    Args:
        path: the file; rows after `resumed_at` are dropped, all if it is None. A process without a
            file only keeps `newest`.
        resumed_at: step of the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resumed_at: int | None = None,
    ):
        self.newest = 0
        """Digest of the batch of the last step that was written."""
        self.rows = JsonlWriter(path, resumed_at=resumed_at) if path else None
        """The file."""
        self._calls: collections.deque[tuple[int, Metrics]] = collections.deque()
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    def observe(self, first: int, batches: Sequence[Mapping[str, Any]]) -> None:
        """Take the batch of each step of the call after step `first`; on any thread."""
        digests = {first + i: digest_batch(batch) for i, batch in enumerate(batches, 1)}
        with self._lock:
            self._digests |= digests

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keep the losses and gradient norms of a call."""
        self._calls.append((step, select(metrics, _NAMES)))
        if len(self._calls) >= ROW + 2 * IN_FLIGHT:  # no more than half of these are still running
            self._write(ROW)

    def sync(self) -> None:
        """Wait for all steps, and flush them to the disk."""
        self._write(len(self._calls))
        if self.rows:
            self.rows.sync()

    def close(self) -> None:
        """Write the calls that are done; after a failure some never will be."""
        is_done = lambda call: all(x.is_ready() for x in jax.tree.leaves(call[1]))
        self._write(len(list(itertools.takewhile(is_done, self._calls))))
        if self.rows:
            self.rows.close()

    def _write(self, calls: int) -> None:
        done = [self._calls.popleft() for _ in range(calls)]
        if not done:
            return
        arrays = jax.tree.leaves([metrics for _, metrics in done])
        if next(iter(arrays[0].devices())).platform != "cpu":
            for array in arrays:  # all at once; on a CPU this would cost more than it saves
                array.copy_to_host_async()
        # Not jax.device_get, which takes 10 us an array.
        fetched = join_calls([jax.tree.map(np.asarray, metrics) for _, metrics in done])
        losses, norms = (fetched[name].total.tolist() for name in _NAMES)
        last = done[-1][0]
        first = last - len(losses) + 1
        with self._lock:
            batches = [self._digests.pop(step, 0) for step in range(first, last + 1)]
        self.newest = batches[-1]
        if self.rows:
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


def _bits(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)
