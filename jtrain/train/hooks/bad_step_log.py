"""Log of bad steps, events.jsonl: each bad step, its data, and what was done about it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.errors import CheckpointError
from jtrain.io import jsonl
from jtrain.io.jsonl import JsonlWriter

Done = Literal["skipped", "rolled back", "stopped"]


class BadStep(NamedTuple):
    """A step that was not finite, or a spike."""

    step: int  # the first is 1
    what: str  # `loss nan, gradient norm inf`
    loss: float
    grad_norm: float
    update_norm: float = 0.0  # nothing is added by a step that is skipped

    @property
    def is_only_update(self) -> bool:
        """True if loss and gradient were finite and the optimizer's update was not."""
        return math.isfinite(self.loss + self.grad_norm) and not math.isfinite(self.update_norm)


def describe_skipped_step(loss: float, grad_norm: float) -> str:
    """Return a description of a skipped step, by its loss and gradient norm."""
    if math.isfinite(loss + grad_norm):
        return f"makes extra non-finite: loss {loss:.4g}"
    return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}"


class RollbackDecision(NamedTuple):
    """Decision to skip some batches from now on, and roll back to before them."""

    step: int  # the bad step
    window: tuple[int, int]


class BadStepLog:
    """Writer of one line for each event: `{"step": 12, "done": "rolled back", "batch": 11, ...}`.

    Events after the checkpoint that a run resumes from are cut off, since the run repeats those
    steps. A rollback decision stays, because the resumed run depends on it.

    Args:
        path: the file, created at the first event; None to write none.
        resumed_at: as `JsonlWriter` takes it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resumed_at: int | None = None,
    ):
        self._path, self._resumed_at = path, resumed_at
        self.rows: JsonlWriter | None = None
        """The file; None before the first event."""
        if path is not None and path.exists():
            self._open(path)

    def append(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Write an event and flush it to the disk."""
        if self._path is not None:
            rows = self.rows or self._open(self._path)
            rows.append({**bad._asdict(), "done": done, **more})
            rows.sync()

    def close(self) -> None:
        """Close the file."""
        if self.rows is not None:
            self.rows.close()

    def _open(self, path: Path) -> JsonlWriter:
        rows = JsonlWriter(path, resumed_at=self._resumed_at, retain=_is_decision)
        self.rows = rows
        return rows


def read_decisions(path: Path) -> Sequence[RollbackDecision]:
    """Return the rollback decisions of a run, in order.

    Raises:
        CheckpointError: if one cannot be read; without it the run would train on other batches.
    """
    return [_decision(path, row) for row in jsonl.complete_rows(path) if _is_decision(row)]


def _decision(path: Path, row: Mapping[str, Any]) -> RollbackDecision:
    match row:
        case {"step": int(step), "without": [int(first), int(stop)]}:
            return RollbackDecision(step, (first, stop))
    raise CheckpointError(
        f"{path} has a row of step {row['step']} about a rollback that does not say which "
        f'batches were skipped: its "without": [first, stop] is missing. Put the file back as it '
        f"was, or start a new run (name=...)."
    )


def _is_decision(row: Mapping[str, Any]) -> bool:
    return row.get("done") == "rolled back"
