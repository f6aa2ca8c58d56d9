"""Writes steps.jsonl: of every step its batch's digest, its loss and its gradient's norm.

By it `jtrain replay` shows that a step is taken again to the same bits, and `jtrain diff` where two
runs part: metrics.jsonl has a row each `log.every` steps, and a number like a loss alone does not
say whether it was the data that was another.
"""

import collections
import itertools
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.data.batches.digest import digest
from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, read_rows

ROW = 64  # calls of the step that share a row
IN_FLIGHT = 16  # calls that may not be done yet: the loop has at most 8


class StepRecord(NamedTuple):
    """What is known of a step that was taken."""

    loss: float
    grad_norm: float
    batch: int
    """The digest of the rows that the first process read; 0 where it is not known."""

    def same(self, other: "StepRecord") -> bool:
        """Whether both numbers have the same bits in float32, a NaN among them."""
        return _bits(self.loss, self.grad_norm) == _bits(other.loss, other.grad_norm)


class StepRecorder(Hook):
    """Keeps what each call computed where it lies, and writes it some calls later, when it is done.

    Args:
        path: the file; rows past `resumed_at` are dropped, all where it is None. Without one, in a
            process that writes none, only `last` is known.
        every: steps a call.
        resumed_at: the step of the checkpoint that the run goes on from.
        lost: as `JsonlWriter` takes it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        every: int,
        resumed_at: int | None = None,
        lost: Callable[[str], object] = lambda line: None,
    ):
        self.every = every
        self.newest = 0
        """The digest of the batch of the last step that `sync` has seen."""
        self.rows = JsonlWriter(path, resumed_at=resumed_at, lost=lost) if path else None
        """The file."""
        self._calls: collections.deque[tuple[int, tuple[Any, Any]]] = collections.deque()
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    def saw(self, call: int, batch: Mapping[str, Any]) -> None:
        """Takes what a call is going to be given, the first call being 0; on any thread."""
        steps = [batch]
        if self.every > 1:
            steps = [{name: x[i] for name, x in batch.items()} for i in range(self.every)]
        found = {call * self.every + 1 + i: digest(each) for i, each in enumerate(steps)}
        with self._lock:
            self._digests |= found

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keeps two arrays of a number a step."""
        self._calls.append((step, (metrics["loss"].total, metrics["grad_norm"].total)))
        if len(self._calls) >= ROW + IN_FLIGHT:
            self._write(ROW)

    def sync(self) -> None:
        """Forces all that was taken to the disk; it waits for it."""
        self._write(len(self._calls))
        if self.rows:
            self.rows.sync()

    def close(self) -> None:
        """Writes of what is left all that is done: after a failure some never will be."""
        done = itertools.takewhile(lambda call: all(x.is_ready() for x in call[1]), self._calls)
        self._write(len(list(done)))
        if self.rows:
            self.rows.close()

    def _write(self, calls: int) -> None:
        taken = [self._calls.popleft() for _ in range(calls)]
        if not taken:
            return
        arrays = [number for _, numbers in taken for number in numbers]
        if next(iter(arrays[0].devices())).platform != "cpu":
            for array in arrays:  # all at once; on a CPU it would cost more than it saves
                array.copy_to_host_async()
        # Not jax.device_get, which takes 10 us for each.
        read_rows = [np.asarray(array) for array in arrays]
        losses, norms = (np.ravel(read_rows[place::2]).tolist() for place in (0, 1))
        last = taken[-1][0]
        first = last - len(losses) + 1
        with self._lock:
            batches = [self._digests.pop(step, 0) for step in range(first, last + 1)]
        self.newest = batches[-1]
        if self.rows:
            self.rows.append({"step": last, "loss": losses, "grad_norm": norms, "batch": batches})


def steps(path: Path) -> dict[int, StepRecord]:
    """What was recorded of each step; of a run that was made before there were records nothing.

    Raises:
        CheckpointError: if a row is not what was written.
    """
    found = {}
    for row in read_rows(path):
        try:
            columns = [*map(float, row["loss"])], [*map(float, row["grad_norm"])], row["batch"]
            each = list(zip(*columns, strict=True))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"the row of step {row['step']} in {path} is not what was written: it needs lists "
                f"of one length under loss, grad_norm and batch. Put the file back as it was, or "
                f"move it away and compare without it: mv {path} {path}.old"
            ) from None
        first = row["step"] - len(each) + 1
        found |= {first + i: StepRecord(*known) for i, known in enumerate(each)}
    return found


def _bits(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)
