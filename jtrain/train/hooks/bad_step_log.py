"""File events.jsonl: the bad steps of a run, and its decisions to roll back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.data.batches.scan import NonfiniteValue, find_nonfinite
from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, complete_rows

Done = Literal["skipped", "rolled back", "stopped"]


class BadStep(NamedTuple):
    """A step that was not finite, or a spike."""

    step: int  # the first is 1
    what: str  # `is not finite: loss nan, gradient norm inf`
    loss: float
    grad_norm: float
    update_norm: float = 0.0  # nothing is added by a step that is skipped


class BadStepLog:
    """Writer of one line for each event: `{"step": 12, "done": "rolled back", "batch": 11, ...}`.

    Events after the checkpoint that a run resumes from are cut off, since the run repeats those
    steps. A rollback decision stays, because the resumed run depends on it.

    Args:
        path: the file, created at the first event; None to write none.
        train: batch of each step from 0, as this process reads it: a `SkipBatches`.
        source: the same with the rows of all processes, which it may number.
        resumed_at: as `JsonlWriter` takes it.
    """

    def __init__(
        self, path: Path | None, train: Any, source: Any, *, resumed_at: int | None = None
    ):
        self.train, self._source = train, source
        self._path, self._resumed_at = path, resumed_at
        self._rows: JsonlWriter | None = None  # None before the first event
        if path is not None and path.exists():
            self._open(path)

    def append(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Write an event, with the data that the step took, and flush it to the disk."""
        row = {**bad._asdict(), "done": done, **self.describe_batch(bad.step), **more}
        if self._path is not None:
            rows = self._rows or self._open(self._path)
            rows.append(row)
            rows.sync()

    def describe_batch(self, step: int) -> dict[str, Any]:
        """Return the number of the batch that a step took, from 0, and its rows in the data set.

        The first step is 1. Rows are those of the whole batch, whichever process read them; they
        are left out where the data set does not number them.
        """
        number = self.train.number(step - 1)
        rows = self._source.indices(step - 1)
        return {"batch": number, **({} if rows is None else {"rows": rows.tolist()})}

    def find_nonfinite(self, step: int) -> tuple[NonfiniteValue, int | None] | None:
        """Return the first value in a step's data that is not finite, and its row of the data set.

        The row is None where the data set does not number its rows.
        """
        found = find_nonfinite(self.train[step - 1])
        if found is None:
            return None
        rows = self.describe_batch(step).get("rows")
        return found, rows[found.row] if rows else None

    def close(self) -> None:
        """Close the file."""
        if self._rows is not None:
            self._rows.close()

    def _open(self, path: Path) -> JsonlWriter:
        self._rows = JsonlWriter(path, resumed_at=self._resumed_at, retain=_is_decision)
        return self._rows


def _is_decision(row: Mapping[str, Any]) -> bool:
    return row.get("done") == "rolled back"


class RollbackDecision(NamedTuple):
    """Decision to skip some batches from now on, and roll back to before them."""

    step: int  # the bad step
    window: tuple[int, int]


def read_decisions(path: Path) -> Sequence[RollbackDecision]:
    """Return the rollback decisions of a run, in order.

    Raises:
        CheckpointError: if one cannot be read; without it the run would train on other batches.
    """
    return [_decision(path, row) for row in complete_rows(path) if _is_decision(row)]


def _decision(path: Path, row: Mapping[str, Any]) -> RollbackDecision:
    match row:
        case {"step": int(step), "without": [int(first), int(stop)]}:
            return RollbackDecision(step, (first, stop))
    raise CheckpointError(
        f"{path} has a row of step {row['step']} about a rollback that does not say which "
        f'batches were skipped: its "without": [first, stop] is missing. Put the file back as it '
        f"was, or start a new run (name=...)."
    )
