"""Log of leaf statistics, leaves.jsonl: what a step does to each leaf of the parameters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.io.jsonl import JsonlWriter


class LeafLog(Hook):
    """Hook that writes a row after steps `every`, 2 `every`, ...

    A row is `{"step": 100, "grad_norm": {"w": 0.5}, ...}`.

    Args:
        path: the file, None to write none; recreated unless the run resumes.
        every: steps.
        stop: the last step of the run, after which no row is written.
        look: `(step, state) -> statistics`, numbers by kind and leaf.
        resumed_at: as `MetricsFile` takes it.
    """

    settles = True  # so that its time is not counted for the steps before it

    def __init__(
        self,
        path: Path | str | None,
        *,
        every: int,
        stop: int,
        look: Callable[[int, Any], Mapping[str, Mapping[str, float]]],
        resumed_at: int | None = None,
    ):
        self.every, self._stop, self._look = every, stop, look
        self.rows = None if path is None else JsonlWriter(path, resumed_at=resumed_at)
        """The file."""

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Write a row."""
        if step < self._stop:
            statistics = self._look(step, state)
            if self.rows is not None:
                self.rows.append({"step": step, **statistics})

    def close(self) -> None:
        """Close the file."""
        if self.rows is not None:
            self.rows.close()
