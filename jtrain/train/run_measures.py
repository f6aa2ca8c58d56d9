"""Hooks that measure a run and show it."""

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import jax

from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import Results, latest_number
from jtrain.train.hooks.log import LogHook, LogLines, MetricHistory, MetricsFile, read_results
from jtrain.train.hooks.progress import ProgressBar
from jtrain.train.hooks.speed import Speed, measure_memory
from jtrain.train.hooks.tracking import Tracking, build_tracking
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir
from jtrain.train.summary import measure_work

# Phases of the heartbeat, by what the progress bar shows; an evaluation is `eval`.
_PHASES = {"saving": "save", "sampling": "sampling", "drawing": "sampling"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
    """Hooks that measure a run and show it."""

    speed: Speed
    metrics: MetricsFile | MetricHistory
    """Metrics file, or the metrics in memory where this process writes no file."""
    history: MetricHistory
    """Metrics in memory."""
    progress: ProgressBar
    log: LogHook
    lines: LogLines
    tracking: Tracking | None

    def write_results(self, step: int, name: str, numbers: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation set to the metrics file and the trackers."""
        self.metrics.row(step, name, numbers)
        if self.tracking is not None:
            self.tracking.row(step, name, numbers)

    @contextlib.contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Show an activity beside training, and exclude its time from the speed."""
        phase = _PHASES.get(activity, "eval")
        with self.speed.pause(), self.progress.during(activity), HEARTBEAT.during(phase):
            yield


def measure(
    resume: ResumePoint,
    run_dir: RunDir | None,
    feed: ReadAhead[Batch],
    results: Mapping[str, Results],
    screen: TextIO | None,
    stack: contextlib.ExitStack,
) -> Measures:
    """Return the hooks that measure a run: speed, metrics, log, progress bar and trackers.

    Args:
        feed: gives the seconds that the loop waited for data.
        results: of the evaluations so far, by set; the log shows the newest loss of the first.
        stack: closes the files of the hooks.
    """
    config, x, start = resume.setup.config, resume.setup.experiment, resume.start
    writes = run_dir if run_dir is not None and run_dir.first else None
    every = log_cadence(config)
    validation_loss = functools.partial(latest_number, next(iter(results.values()), {}))
    speed = Speed(
        writes and writes.speed,
        every=every,
        stop=config.steps,
        rows=config.batch,
        tokens=config.batch * x.tokens or None,
        work=measure_work(resume.setup) if writes else None,
        waited=lambda: feed.waited,
        memory=functools.partial(measure_memory, _own_devices(resume)),
        began=lambda: {"compile": HEARTBEAT.seconds()["compile"]},
        resumed_at=start,
        steps_per_call=resume.setup.schedule.most,
    )
    stack.callback(speed.close)
    metrics = history = MetricHistory(every=every)
    if writes is not None:
        metrics = MetricsFile(writes.metrics, every=every, resumed_at=start)
        stack.callback(metrics.close)
    shown = screen or sys.stdout  # None if it was closed
    shown = shown if shown and (run_dir is None or run_dir.first) else io.StringIO()
    progress = ProgressBar(
        start=start or 0,
        stop=config.steps,
        speed=speed,
        valid=lambda: _losses(next(iter(results.values()), {})),
        earlier=lambda: _losses(earlier_results(run_dir, "", start)),
        steps_per_call=resume.setup.schedule.most,
        stream=shown,
    )
    lines = LogLines(run_dir and run_dir.log, screen=progress.print, live=progress.live)
    log = LogHook(
        every=every,
        stop=config.steps,
        log=lines.note,
        speed=speed,
        valid=validation_loss if results else None,
        learning_rate=config.optimizer.learning_rate(config.steps),
    )
    tracking = None
    if writes is not None and config.trackers:
        tracking = build_tracking(
            config, writes.path, speed, run=writes.id, log=lines.print, resumed_at=start
        )
        stack.callback(tracking.close, "failed")  # unless it was closed with the run's status
    return Measures(
        speed=speed,
        metrics=metrics,
        history=history,
        progress=progress,
        log=log,
        lines=lines,
        tracking=tracking,
    )


def _own_devices(resume: ResumePoint) -> list[Any]:
    """Return the devices of a run that this process has."""
    index = jax.process_index()
    return [device for device in resume.setup.devices if device.process_index == index]


def earlier_results(
    run_dir: RunDir | None, name: str, start: int | None
) -> dict[int, Mapping[str, float]]:
    """Return the results of a set up to the step that a run resumes from, by step, in order.

    Args:
        name: of the set; empty for the numbers of the training.
    """
    if run_dir is None or start is None:
        return {}
    # Another process may not yet have cut off what came after the checkpoint.
    results = read_results(run_dir.metrics, name)
    return {step: results[step] for step in sorted(results) if step <= start}


def _losses(results: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    return {step: numbers["loss"] for step, numbers in results.items() if "loss" in numbers}


def log_cadence(config: RunConfig) -> int:
    """Return the steps between two log lines; a short run logs its last step."""
    return min(config.log.every, config.steps)
