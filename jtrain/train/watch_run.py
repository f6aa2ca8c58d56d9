"""Watched run: its checkpoints are evaluated one by one while another program trains it."""

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jtrain.checkpoint import CheckpointManager
from jtrain.core.types import Batch
from jtrain.distributed.multihost import all_gather, broadcast_from_first
from jtrain.distributed.shutdown import NotedSignals
from jtrain.errors import STOPPED, CheckpointError, ConfigError
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.tracking import track_evaluations
from jtrain.train.restore_run import Log, set_up_on_devices
from jtrain.train.run_dir import RunDir
from jtrain.train.run_record import find_run
from jtrain.train.setup import TrainSetup
from jtrain.train.trackers import check_installed
from jtrain.train.watched_checkpoints import PINS, Policy, WatchedCheckpoints

POLL = 1.0  # seconds between two looks at the run


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of a checkpoint, by set."""

    step: int
    results: "Results"


@dataclasses.dataclass(frozen=True)
class WatchEnd:
    """End of a watch, with its exit code."""

    code: int
    why: str


Results: TypeAlias = Mapping[str, Mapping[str, Any]]


class _AskedError(Exception):
    """A signal asks this process to end, in the middle of an evaluation."""


def wait_for_run(run: str, timeout: float, log: Log, asked: NotedSignals) -> Path:
    """Return the directory of a run; wait for it to begin.

    Args:
        timeout: seconds; 0: without end.

    Raises:
        ConfigError: if there is none in time, with those that exist.
    """
    end, announced = time.monotonic() + (timeout or float("inf")), False
    while True:
        try:
            return find_run(run, "jtrain eval")
        except ConfigError as error:
            if time.monotonic() > end or asked.name:
                raise
            if not announced:
                log(f"{error}\nwaiting for {run} to begin")
                announced = True
        time.sleep(POLL / 4)


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
        asked: a signal in it ends the watch.

    Raises:
        CheckpointError: if another process watches the run.
        ConfigError: if the values are not those of the run, it has no evaluation set, or the
            package of a tracker is not installed.
    """
    setup, run_dir = set_up_on_devices(config, directory, log)
    check_installed(config.trackers)
    asked.install()  # again: jax.distributed has installed its own
    if not setup.sets:
        raise ConfigError(f"experiment {config.experiment} has no `valid` to evaluate a run on.")
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if run_dir.first:
            tracking = track_evaluations(config, run_dir.path, run=run_dir.id, log=log)
            stack.callback(tracking.close, "stopped")  # unless it was closed with the run's end
            checkpoints = WatchedCheckpoints(run_dir, policy, timeout, stack, log, tracking)
        while True:
            found = broadcast_from_first(checkpoints.look if checkpoints else dict)
            if error := found.get("error"):
                raise CheckpointError(error)
            if end := _find_end(found, asked):
                yield end
                return
            step = found.get("step")
            if step is None:
                time.sleep(POLL)
                continue
            results = _evaluate(setup, run_dir, step, asked, log)
            if checkpoints is not None:
                checkpoints.record(step, results)
            if results is not None:
                yield Evaluation(step, results)


def _find_end(found: Mapping[str, Any], asked: NotedSignals) -> WatchEnd | None:
    """Return the end of the watch, in all processes alike."""
    if names := [name for name in all_gather(asked.name) if name]:
        words = f"{names[0]}: the watch ends; the same command goes on with it"
        return WatchEnd(STOPPED, words)
    return WatchEnd(found["code"], found["end"]) if "end" in found else None


def _evaluate(
    setup: TrainSetup, run_dir: RunDir, step: int, asked: NotedSignals, log: Log
) -> Results | None:
    """Return the metrics of a pinned checkpoint; None if it is damaged, or a signal has come."""

    def reading(batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if asked.name and jax.process_count() == 1:  # several end together, afterwards
                raise _AskedError
            yield batch

    path, owner = run_dir.path / PINS, run_dir.owner()
    try:
        with CheckpointManager(path, first=run_dir.first, owner=owner) as checkpoints:
            state = checkpoints.restore(step, setup.like)
        return {name: setup.measure(state, name, reading) for name in setup.sets}
    except CheckpointError as error:  # the bytes differ, in all processes alike
        log(f"{error}")
    except _AskedError:
        pass
    return None
