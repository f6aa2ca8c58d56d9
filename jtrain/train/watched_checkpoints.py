"""Checkpoints of a run that another program trains: the next one to evaluate, and the last."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jtrain.checkpoint import layout
from jtrain.checkpoint.lock import WriteLock, read_holder
from jtrain.checkpoint.pinned import RemovedError, pin, unpin_all
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
        self._skipped: set[int] = set()
        self._known: set[int] = set()  # listed, and neither evaluated nor skipped
        self._signs: list[tuple[int, int]] = []
        self._changed = time.monotonic()
        self._pinned = -1
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
        if results is None:
            self._skipped.add(step)
        else:
            self._rows.append(step, results)
            for name, numbers in results.items():
                self._tracking.row(step, name, numbers)
        self._unpin()

    def _look(self) -> dict[str, Any]:
        rows = self._rows or self._open()
        status = self._run_dir.facts().get("status", "")  # before the list: no later one is missed
        steps = layout.list_steps(self._run_dir.checkpoints, self._run_dir.owner())
        self._report_removed(steps)
        while (step := self._choose(steps, rows)) is not None:
            try:
                pin(self._run_dir.checkpoints, step, self._pins, self._run_dir.owner())
                self._pinned = step
                return {"step": step}
            except RemovedError as error:
                self._skipped.add(step)
                self._log(f"{error}. It is skipped")
        if status in _ENDED:
            return self._end(status, steps, rows)
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

    def _choose(self, steps: list[int], rows: EvaluationRows) -> int | None:
        """Return the next step to evaluate."""
        done = rows.steps | self._skipped
        if self._policy == "latest":
            newest = max(steps, default=None)
            return None if newest in done else newest
        return next((step for step in steps if step not in done), None)

    def _report_removed(self, steps: list[int]) -> None:
        """Log the checkpoints that were listed before and are gone, under the policy `every`."""
        assert self._rows is not None, "opened by the first look"
        done = self._rows.steps | self._skipped
        for step in sorted(self._known - set(steps) - done):
            if self._policy == "every":
                self._log(f"checkpoint {step} was removed before its turn, and is skipped")
            self._skipped.add(step)
        self._known = set(steps) - done

    def _end(self, status: str, steps: list[int], rows: EvaluationRows) -> dict[str, Any]:
        last = max(steps, default=None)
        if last is not None and last not in rows.steps:
            words = f"the run is {status}, and its last checkpoint ({last}) cannot be evaluated"
            return {"end": words, "code": FAULT}
        evaluated = f"step {last} is evaluated" if last is not None else "it has no checkpoint"
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
        newest = max(rows.steps, default=None)
        last = f"step {newest}" if newest is not None else "no step"
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
        if self._pinned >= 0:
            layout.try_remove(self._pins / str(self._pinned))
        self._pinned = -1


def _sign(path: Path) -> tuple[int, int]:
    """Return time and size of a file or folder; zeros if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
