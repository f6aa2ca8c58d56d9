"""Writes events.jsonl: each bad step of a run, the data it took, and what was done about it."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    def of_update_alone(self) -> bool:
        """Whether the optimizer made what is not finite of a finite gradient."""
        return math.isfinite(self.loss + self.grad_norm) and not math.isfinite(self.update_norm)


def not_finite(loss: float, grad_norm: float) -> str:
    """Return what is wrong with a step that was skipped, by its loss and gradient norm."""
    if math.isfinite(loss + grad_norm):
        return f"changes extra to what is not finite: loss {loss:.4g}"
    return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}"


class RollbackDecision(NamedTuple):
    """To leave out some batches from now on, and go back to before them."""

    step: int  # that was bad
    window: tuple[int, int]


class BadStepLog:
    """A line for each event: `{"step": 12, "done": "rolled back", "batch": 11, ...}`.

    Those of steps past the checkpoint that a run goes on from will be written again and are cut
    off; a decision to go back stays, for it is what the run goes on by.

    Args:
        path: the file; None to write none. It is there once there is an event.
        resumed_at, lost: as `JsonlWriter`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resumed_at: int | None = None,
        lost: Callable[[str], object] = lambda line: None,
    ):
        self._path, self._resumed_at, self._lost = path, resumed_at, lost
        self.rows: JsonlWriter | None = None
        """The file; None before there is an event."""
        if path is not None and path.exists():
            self._open(path)

    def append(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Writes an event; when this returns no power cut takes it."""
        if self._path is not None:
            found = self.rows or self._open(self._path)
            found.append({**bad._asdict(), "done": done, **more})
            found.sync()

    def close(self) -> None:
        """Closes the file."""
        if self.rows is not None:
            self.rows.close()

    def _open(self, path: Path) -> JsonlWriter:
        rows = JsonlWriter(path, resumed_at=self._resumed_at, lasts=_is_decision, lost=self._lost)
        self.rows = rows
        return rows


def decisions(path: Path) -> Sequence[RollbackDecision]:
    """Those that were taken in a run, in order; none if nothing was ever bad.

    Raises:
        CheckpointError: if one cannot be read: without it the run would take other batches.
    """
    return [_decision(path, row) for row in jsonl.complete_rows(path) if _is_decision(row)]


def _decision(path: Path, row: Mapping[str, Any]) -> RollbackDecision:
    match row:
        case {"step": int(step), "without": [int(first), int(stop)]}:
            return RollbackDecision(step, (first, stop))
    raise CheckpointError(
        f"{path} has a row of step {row['step']} that says the run went back, and not which "
        f'batches it left out: "without": [first, stop] is missing in it. Put the file back as it '
        f"was, or start a new run (name=...)."
    )


def _is_decision(row: Mapping[str, Any]) -> bool:
    return row.get("done") == "rolled back"
