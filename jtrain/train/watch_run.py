"""Watched run: its checkpoints are evaluated one by one while another program trains it."""

import contextlib
import os
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from jtrain.checkpoint import CheckpointManager, layout
from jtrain.checkpoint.lock import WriteLock, read_holder
from jtrain.checkpoint.pinned import RemovedError, pin, unpin_all
from jtrain.checkpoint.seal import sealed_digest
from jtrain.config.dump import flatten, to_plain
from jtrain.distributed.multihost import all_gather, broadcast_from_first
from jtrain.distributed.shutdown import NotedSignals
from jtrain.errors import DONE, FAULT, STOPPED, CheckpointError, ConfigError
from jtrain.io.jsonl import JsonlWriter, complete_rows
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.program import Program
from jtrain.train.restore import Log, set_up_stored
from jtrain.train.run_dir import RunDir
from jtrain.train.trackers import End, TrackedRun, check_installed

POLL = 1.0  # seconds between two looks at the run
NAME = "evaluations.jsonl"  # file of a run with the results of its watches
PINS = "evaluating"  # folder of the run with the checkpoint that is read
_ENDS: Mapping[int, End] = {DONE: "done", STOPPED: "stopped", FAULT: "failed"}  # by the exit code
Policy: TypeAlias = Literal["every", "latest"]
Results: TypeAlias = Mapping[str, Mapping[str, Any]]  # by set


class Evaluation(NamedTuple):
    """Results of a checkpoint."""

    step: int
    results: Results


class WatchEnd(NamedTuple):
    """End of a watch, with its exit code."""

    code: int
    why: str


def watch_run(
    config: RunConfig,
    directory: Path,
    *,
    policy: Policy = "every",
    timeout: float = 600.0,
    asked: NotedSignals,
    log: Log = lambda line: None,
) -> Generator[Evaluation | WatchEnd, None, None]:
    """Evaluate each new checkpoint of a run until the run has ended; yield the results, then why.

    Each step is evaluated once, also over several watches. Every process calls this.

    Args:
        policy: every checkpoint, or only the latest at a time.
        timeout: seconds without a change of the run's files after which it counts as ended; 0:
            without end.
        asked: a signal in it ends the watch, after the evaluation that goes on.

    Raises:
        CheckpointError: if another process watches the run.
        ConfigError: if the values are not those of the run, it has no evaluation set, or the
            package of a tracker is not installed.
    """
    program, run_dir = set_up_stored(config, directory, log)
    check_installed(config.trackers)
    asked.install()  # again: jax.distributed has installed its own
    if not program.resolved.sets:
        raise ConfigError(f"experiment {config.experiment} has no `valid` to evaluate a run on.")
    with contextlib.ExitStack() as stack:
        watched = None
        if run_dir.first:
            # A run of its own in each service, which takes the rows of a run from one process.
            name, folder = f"{config.name}-evaluation", run_dir.path / "evaluation"
            about = TrackedRun(name, folder, flatten(to_plain(config)), run=run_dir.id)
            tracking = Tracking(config.trackers, about, resumed_at=0)
            stack.callback(tracking.close, "stopped")  # unless it was closed with the run's end
            watched = _WatchedCheckpoints(run_dir, policy, timeout, log, tracking)
            stack.callback(watched.close)
        while True:
            found = broadcast_from_first(watched.look if watched else dict)
            if end := _find_end(found, asked):
                yield end
                return
            if (step := found.get("step")) is None:
                time.sleep(POLL)
                continue
            results = _evaluate(program, run_dir, step, log)
            if watched is not None:
                watched.record(step, results)
            if results is not None:
                yield Evaluation(step, results)


def _find_end(found: Mapping[str, Any], asked: NotedSignals) -> WatchEnd | None:
    if names := [name for name in all_gather(asked.name) if name]:
        words = f"{names[0]}: the watch ends; the same command goes on with it"
        return WatchEnd(STOPPED, words)
    return WatchEnd(found["code"], found["end"]) if "end" in found else None


def _evaluate(program: Program, run_dir: RunDir, step: int, log: Log) -> Results | None:
    path, owner = run_dir.path / PINS, run_dir.owner()
    try:
        with CheckpointManager(path, first=run_dir.first, owner=owner) as checkpoints:
            state = checkpoints.restore(step, program.resolved.abstract_state)
        return {name: program.measure(state, name, iter) for name in program.resolved.sets}
    except CheckpointError as error:  # the bytes differ, in all processes alike
        log(f"{error}")
    return None


class _WatchedCheckpoints:
    """Checkpoints of a watched run: which comes next, and evaluations.jsonl of those evaluated.

    Only the first process has them. A checkpoint is a step and the digest of its seal: after a
    rollback the step has another one, whose row replaces the older one. Rows are those of
    metrics.jsonl, `{"step": 20, "valid/loss": 2.25}`, with the run's id under `run` and the digest
    under `seal`. The training process never opens the file, so neither waits for the other.
    """

    def __init__(
        self,
        run_dir: RunDir,
        policy: Policy,
        timeout: float,
        log: Log,
        tracking: Tracking,
    ):
        self._run_dir, self._policy, self._timeout = run_dir, policy, timeout
        self._log, self._tracking = log, tracking
        self._pins = run_dir.path / PINS
        self._skipped: set[tuple[int, str]] = set()  # damaged
        self._pinned = 0, ""
        self._sign, self._changed = 0, time.monotonic()
        self._rows: JsonlWriter | None = None  # opened by the first look
        self._seals: dict[int, str] = {}  # by the step that is evaluated
        self._lock: WriteLock | None = None

    def look(self) -> dict[str, Any]:
        """Return the step to evaluate, which is pinned, or why the watch ends, or nothing."""
        if self._rows is None:
            self._open()
        found = self._look()
        if "code" in found:
            self._tracking.close(_ENDS[found["code"]])
        return found

    def record(self, step: int, results: Results | None) -> None:
        """Write the row of a step, and unpin it; without results it is left out from now on."""
        if results is None:
            self._skipped.add(self._pinned)
        else:
            self._append(step, self._pinned[1], results)
            for name, numbers in results.items():
                self._tracking.row(step, name, numbers)
        list(unpin_all(self._pins))

    def close(self) -> None:
        if self._rows is not None and self._lock is not None:
            self._rows.close()
            list(unpin_all(self._pins))
            self._lock.release()
            with contextlib.suppress(OSError):
                self._pins.rmdir()  # that of a process that was killed

    def _append(self, step: int, seal: str, results: Results) -> None:
        assert self._rows is not None, "opened by the first look"
        if step in self._seals:
            self._rows.close()
            self._rows = JsonlWriter(self._rows.path, retain=lambda row: row["step"] != step)
        named = {f"{name}/{key}": x for name, each in results.items() for key, x in each.items()}
        self._rows.append({"step": step, **named, "run": self._run_dir.id, "seal": seal})
        self._rows.sync()
        self._seals[step] = seal

    def _look(self) -> dict[str, Any]:
        status = self._run_dir.facts().get("status", "")  # before the list: no later one is missed
        directory, owner = self._run_dir.checkpoints, self._run_dir.owner()
        steps = layout.list_steps(directory, owner)
        for step in steps[-1:] if self._policy == "latest" else steps:
            found = step, sealed_digest(directory / str(step))
            if found in self._skipped or found in self._seals.items():
                continue
            try:
                pin(directory, step, self._pins, owner)
            except RemovedError as error:
                self._log(f"{error}. It is skipped")
                continue
            self._pinned = step, sealed_digest(self._pins / str(step))
            return {"step": step}
        if status not in {"done", "failed"}:
            return self._check_changes(status)
        last = (steps[-1], sealed_digest(directory / str(steps[-1]))) if steps else None
        if last is not None and last not in self._seals.items():
            words = f"its last checkpoint ({last[0]}) cannot be evaluated"
            return {"end": f"the run is {status}, and {words}", "code": FAULT}
        words = f"step {last[0]} is evaluated" if last else "it has no checkpoint"
        return {"end": f"the run is {status}, and {words}", "code": DONE}

    def _open(self) -> None:
        """Lock the watch of the run, and open its rows, without those of another run's id."""
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
        list(unpin_all(self._pins))  # of a process that was killed
        path, run = self._run_dir.path / NAME, self._run_dir.id
        self._rows = JsonlWriter(path, retain=lambda row: row.get("run") == run)
        self._seals = {row["step"]: row.get("seal", "") for row in complete_rows(path)}
        self._lock = lock

    def _check_changes(self, status: str) -> dict[str, Any]:
        sign, now = _last_change(self._run_dir.path), time.monotonic()
        if sign != self._sign:
            self._sign, self._changed = sign, now
        if not self._timeout or now - self._changed < self._timeout:
            return {}
        resume = f"To go on: {self._run_dir.resume_command}, and watch again"
        if status in {"stopped", "crashed"}:
            words = f"the run is {status}, and was not resumed within {self._timeout:g} s. {resume}"
            return {"end": words, "code": STOPPED if status == "stopped" else FAULT}
        last = f"step {max(self._seals)}" if self._seals else "no step"
        return {
            "end": f"nothing of the run has changed for {self._timeout:g} s, though its status is "
            f"{status or 'unknown'}: it was killed, or hangs; {last} was evaluated last. {resume}; "
            f"for a run that writes more rarely, a larger --timeout",
            "code": FAULT,
        }


def _last_change(run: Path) -> int:
    """Return when a file of a run was written last, in nanoseconds: it shows that the run lives."""
    with contextlib.suppress(OSError):  # a file that was just renamed
        return max(entry.stat().st_mtime_ns for entry in os.scandir(run))
    return 0
