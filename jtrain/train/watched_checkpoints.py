"""Checkpoints of a run that another program trains: the next one to evaluate, and the last."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from jtrain.checkpoint import layout
from jtrain.checkpoint.lock import WriteLock, read_holder
from jtrain.checkpoint.pinned import RemovedError, pin, unpin_all
from jtrain.checkpoint.seal import sealed_digest
from jtrain.errors import DONE, FAULT, STOPPED, CheckpointError
from jtrain.train.evaluation_rows import EvaluationRows
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.run_dir import RunDir
from jtrain.train.trackers import End

Log: TypeAlias = Callable[[str], None]
Policy: TypeAlias = Literal["every", "latest"]
PINS = "evaluating"  # folder of the run with the checkpoint that is read
# Files of a run whose change shows that it lives.
_SIGNS = ("run.json", "metrics.jsonl", "speed.jsonl", "time.jsonl", "log.txt", "checkpoints")
_ENDS: dict[int, End] = {DONE: "done", STOPPED: "stopped", FAULT: "failed"}  # by the exit code
_ENDED = {"done", "failed"}  # statuses after which no further checkpoint comes


class Checkpoint(NamedTuple):
    """Checkpoint of a step; after a rollback the step has another one, with another seal."""

    step: int
    seal: str
    """Digest of the seal; empty if unknown."""


class WatchedCheckpoints:
    """Checkpoints of a watched run: which comes next, and the rows of those that are evaluated.

    Only the first process has them.

    Args:
        policy: every checkpoint, or only the latest at a time.
        timeout: seconds without a change of the run's files after which it counts as ended; 0:
            without end.
        stack: closes what is opened.
        log: takes a line.
        tracking: gets the results, too.
    """

    def __init__(
        self,
        run_dir: RunDir,
        policy: Policy,
        timeout: float,
        stack: contextlib.ExitStack,
        log: Log,
        tracking: Tracking,
    ):
        self._run_dir, self._policy, self._timeout = run_dir, policy, timeout
        self._stack, self._log, self._tracking = stack, log, tracking
        self._pins = run_dir.path / PINS
        self._skipped: set[Checkpoint] = set()  # damaged
        self._known: set[Checkpoint] = set()  # listed, and neither evaluated nor skipped
        self._signs: list[tuple[int, int]] = []
        self._changed = time.monotonic()
        self._pinned: Checkpoint | None = None
        self._rows: EvaluationRows | None = None

    def look(self) -> dict[str, Any]:
        """Return the step to evaluate, which is pinned, or why the watch ends, or nothing."""
        try:
            found = self._look()
        except CheckpointError as error:
            return {"error": str(error)}
        if "code" in found:
            self._tracking.close(_ENDS[found["code"]])
        return found

    def record(self, step: int, results: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Write the row of a step, and unpin it; without results it is left out from now on."""
        assert self._rows is not None, "opened by the first look"
        assert self._pinned is not None, "pinned by the last look"
        assert self._pinned.step == step, "one at a time"
        if results is None:
            self._skipped.add(self._pinned)
        else:
            self._rows.append(step, self._pinned.seal, results)
            for name, numbers in results.items():
                self._tracking.row(step, name, numbers)
        self._unpin()

    def _look(self) -> dict[str, Any]:
        rows = self._rows or self._open()
        status = self._run_dir.facts().get("status", "")  # before the list: no later one is missed
        directory, owner = self._run_dir.checkpoints, self._run_dir.owner()
        steps = layout.list_steps(directory, owner)
        found = [Checkpoint(step, sealed_digest(directory / str(step))) for step in steps]
        self._report_removed(found, rows)
        while (chosen := self._choose(found, rows)) is not None:
            step = chosen.step
            try:
                pin(directory, step, self._pins, owner)
            except RemovedError as error:
                found.remove(chosen)
                self._known.discard(chosen)
                self._log(f"{error}. It is skipped")
                continue
            self._pinned = Checkpoint(step, sealed_digest(self._pins / str(step)))
            return {"step": step}
        if status in _ENDED:
            return self._end(status, found, rows)
        return self._check_signs(status, rows)

    def _open(self) -> EvaluationRows:
        """Lock the watch of the run, and open its rows."""
        try:
            lock = WriteLock(self._pins)
        except CheckpointError:
            holder = read_holder(self._pins)
            if not holder:
                raise
            raise CheckpointError(
                f"{self._run_dir.path} is watched by process {holder['pid']} on "
                f"{holder['host']}, and each checkpoint is evaluated once. Wait for it, or stop "
                f"it: kill {holder['pid']}"
            ) from None
        self._stack.callback(self._remove_folder)  # of a process that was killed
        self._stack.callback(lock.release)
        self._stack.callback(self._unpin)
        list(unpin_all(self._pins))
        self._rows = EvaluationRows(self._run_dir.path, self._run_dir.id)
        self._stack.callback(self._rows.close)
        return self._rows

    def _choose(self, found: list[Checkpoint], rows: EvaluationRows) -> Checkpoint | None:
        """Return the next checkpoint to evaluate."""
        due = found[-1:] if self._policy == "latest" else found
        return next((each for each in due if not self._is_done(each, rows)), None)

    def _is_done(self, checkpoint: Checkpoint, rows: EvaluationRows) -> bool:
        return checkpoint in self._skipped or rows.has(*checkpoint)

    def _report_removed(self, found: list[Checkpoint], rows: EvaluationRows) -> None:
        """Log the checkpoints that were listed before and are gone, under the policy `every`."""
        for checkpoint in sorted(self._known - set(found)):
            if self._policy == "every" and not self._is_done(checkpoint, rows):
                self._log(
                    f"checkpoint {checkpoint.step} was removed before its turn, and is skipped"
                )
        self._known = {each for each in found if not self._is_done(each, rows)}

    def _end(self, status: str, found: list[Checkpoint], rows: EvaluationRows) -> dict[str, Any]:
        last = max(found, default=None)
        if last is not None and not rows.has(*last):
            words = f"its last checkpoint ({last.step}) cannot be evaluated"
            return {"end": f"the run is {status}, and {words}", "code": FAULT}
        evaluated = f"step {last.step} is evaluated" if last is not None else "it has no checkpoint"
        return {"end": f"the run is {status}, and {evaluated}", "code": DONE}

    def _check_signs(self, status: str, rows: EvaluationRows) -> dict[str, Any]:
        """Return the end of a run whose files have not changed for long; nothing before."""
        signs = [_sign(self._run_dir.path / name) for name in _SIGNS]
        now = time.monotonic()
        if signs != self._signs:
            self._signs, self._changed = signs, now
        if not self._timeout or now - self._changed < self._timeout:
            return {}
        resume = f"To go on: {self._run_dir.resume_command}, and watch again"
        if status in {"stopped", "crashed"}:
            words = f"the run is {status}, and was not resumed within {self._timeout:g} s. {resume}"
            return {"end": words, "code": STOPPED if status == "stopped" else FAULT}
        last = f"step {rows.newest}" if rows.newest is not None else "no step"
        return {
            "end": f"nothing of the run has changed for {self._timeout:g} s, though its status is "
            f"{status or 'unknown'}: it was killed, or hangs; {last} was evaluated last. {resume}; "
            f"for a run that writes more rarely, a larger --timeout",
            "code": FAULT,
        }

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            self._pins.rmdir()

    def _unpin(self) -> None:
        if self._pinned is not None:
            layout.try_remove(self._pins / str(self._pinned.step))
        self._pinned = None


def _sign(path: Path) -> tuple[int, int]:
    """Return time and size of a file or folder; zeros if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
