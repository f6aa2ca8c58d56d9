"""Hooks of a run, each made for its place in the trainer's list."""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.dump import flatten, to_plain
from jtrain.core.loop import Hook
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.distributed.multihost import barrier
from jtrain.io.disk_errors import disk_advice
from jtrain.io.jsonl import JsonlWriter
from jtrain.io.log import LOG, RunLog
from jtrain.io.regular_files import atomic_write, open_regular
from jtrain.parallel.chips import peak_flops
from jtrain.train.charts import write_pictures
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStepLog
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.hooks.evaluation import EarlyStop, EvaluateEvery, add_listeners
from jtrain.train.hooks.log import read_results
from jtrain.train.hooks.progress import ProgressBar
from jtrain.train.hooks.signals import Signals
from jtrain.train.hooks.speed import Speed, Total, measure_memory
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.program import Program
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir
from jtrain.train.run_store import RunStore
from jtrain.train.summary import count_step_flops
from jtrain.train.trackers import TrackedRun

RECORDED = 16  # short steps between two looks at the numbers of all steps
SHORT = 1e-3  # seconds of a step, by the size of its state, whose numbers may wait for others
Pause: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A start or a resume of a run, up to its end or a rollback."""

    program: Program
    resume: ResumePoint
    store: RunStore
    signals: Signals
    log: RunLog
    closing: contextlib.ExitStack
    """Closes the files of the hooks."""

    @property
    def config(self) -> RunConfig:
        """Config of the run, with a number of steps for each duration."""
        return self.program.resolved.config

    @property
    def files(self) -> RunDir | None:
        """Files of the run; None of one in memory."""
        return self.store.run_dir

    @property
    def written_files(self) -> RunDir | None:
        """Files of the run, where this process writes them."""
        return self.files if self.files and self.files.first else None

    @property
    def start(self) -> int:
        """Step that it begins after."""
        return self.resume.start or 0

    @property
    def log_every(self) -> int:
        """Steps between two log lines; a short run logs its last step."""
        return min(self.config.log.every, self.config.steps)

    @property
    def record_every(self) -> int:
        """Steps between two looks at the numbers of all steps, the same in every run."""
        schedule = self.resume.schedule
        calls = RECORDED // schedule.longest if schedule.update_seconds < SHORT else 1
        return schedule.longest * max(calls, 1)


def open_rows(run: Attempt, path: Path | None) -> JsonlWriter | None:
    """Open a file of rows where this process writes it; it is closed with the attempt.

    The rows of steps that the run repeats are dropped, all of a new run.
    """
    if path is None or run.written_files is None:
        return None
    rows = JsonlWriter(path, resumed_at=run.resume.start)
    run.closing.callback(rows.close)
    return rows


def make_evaluations(
    run: Attempt, pause: Pause, write: Callable[[int, str, Mapping[str, Any]], None]
) -> dict[str, EvaluateEvery]:
    """Return the hook that evaluates each set, the main one first."""
    config, sets = run.config, run.config.evaluate.sets

    def make(name: str) -> EvaluateEvery:
        every = sets[name].every if name in sets else config.evaluate.every

        def measure(state: TrainState) -> dict[str, float]:
            with pause("evaluating"):
                reading = lambda batches: run.signals.through(batches, "eval")
                return run.program.measure(state, name, reading)

        return EvaluateEvery(
            every=every or config.steps,
            measure=measure,
            log=lambda step, numbers: write(step, name, numbers),
            name=name,
            best=config.checkpoint.best.replace(f"{name}/", ""),
            results=_earlier_results(run, name),
        )

    return {name: make(name) for name in run.program.resolved.sets}


def _earlier_results(run: Attempt, name: str) -> dict[int, Mapping[str, float]]:
    if run.files is None or run.resume.start is None:
        return {}
    # Another process may not yet have cut off what came after the checkpoint.
    results = read_results(run.files.metrics, name)
    return {step: results[step] for step in sorted(results) if step <= run.start}


def find_best(run: Attempt, evaluations: Mapping[str, EvaluateEvery]) -> EvaluateEvery | None:
    """Return the evaluation whose best is retained; None if none is."""
    goal = BestMetric.parse(run.config.checkpoint.best)
    if goal is None or not evaluations:
        return None
    return evaluations.get(goal.set_name) or next(iter(evaluations.values()))


def make_bad_steps(run: Attempt, state: TrainState) -> BadSteps:
    """Return the recorder that judges each step."""
    resume, path = run.resume, run.written_files and run.written_files.events
    train = resume.batches.train
    source = run.program.resolved.train(train.windows, own_rows=False)
    log = BadStepLog(path, train, source, resumed_at=resume.start)
    run.closing.callback(log.close)
    return BadSteps(
        run.config,
        log,
        every=run.record_every,
        start=run.start,
        skipped=int(state.skipped),
        earlier=resume.earlier,
        minimum=getattr(state.scale, "minimum", 0.0),
        known=resume.known,
    )


def read_ahead(run: Attempt, record: StepRecorder | None) -> ReadAhead[Batch]:
    """Return the batches of the calls, on the devices; the record sees them first."""
    workers, schedule = run.config.workers, run.resume.schedule
    workers.check(run.program.resolved.experiment.train)
    place = lambda batch, first: run.program.place(batch, schedule, first=first)
    observe = record and record.observe
    feed = run.resume.batches.read_ahead(workers, run.start, place, observe)
    return run.closing.enter_context(feed)


def measure_speed(run: Attempt, feed: ReadAhead[Batch]) -> Speed:
    """Return the hook that measures the speed, whose pauses are those of the others."""
    config, resolved = run.config, run.program.resolved
    own = [x for x in resolved.devices if x.process_index == jax.process_index()]
    peak = peak_flops(resolved.devices) if run.written_files else None
    rows = [x.config.batch for x in resolved.parts]
    tokens = [x.config.batch * x.experiment.tokens for x in resolved.parts]
    return Speed(
        open_rows(run, run.written_files and run.written_files.speed),
        every=run.log_every,
        stop=config.steps,
        rows=lambda step: resolved.trained(step, rows),
        tokens=(lambda step: resolved.trained(step, tokens)) if tokens[-1] else None,
        flops=_total_flops(run.program) if peak else (None, None),
        peak=peak,
        waited=lambda: feed.waited,
        memory=functools.partial(measure_memory, own),
    )


def _total_flops(program: Program) -> tuple[Total | None, Total | None]:
    """Return the model's and the hardware's FLOPs over the first steps of a run."""
    each = [count_step_flops(x) for x in (*program.stages, program)]

    def total(flops: Sequence[float | None]) -> Total | None:
        known = [x for x in flops if x is not None]
        if len(known) < len(flops):
            return None
        return lambda step: program.resolved.trained(step, known)

    return total([x.model for x in each]), total([x.hardware for x in each])


def show_progress(
    run: Attempt, speed: Speed, valid: Callable[[], float | None] | None
) -> ProgressBar:
    """Return the live display; `valid` gives the newest validation loss."""
    return ProgressBar(
        start=run.start,
        stop=run.config.steps,
        speed=speed,
        valid=valid or (lambda: None),
        steps_per_call=run.resume.schedule.longest,
        stream=run.log.stream,
    )


def track(run: Attempt, speed: Speed) -> Tracking | None:
    """Return the hook that sends numbers to the trackers, if there are any."""
    if run.written_files is None or not run.config.trackers:
        return None
    config, learning_rate = run.config, run.program.resolved.learning_rate

    def more(updates: int) -> dict[str, float]:
        numbers, pace = {"learning_rate": float(learning_rate(updates))}, speed.pace
        if pace is not None:
            numbers |= {f"{speed.unit}_per_second": speed.rate, "waiting": pace.waiting}
            numbers |= {} if pace.mfu is None else {"mfu": pace.mfu}
        return numbers

    files, at = run.written_files, run.resume.start
    about = TrackedRun(config.name, files.path, flatten(to_plain(config)), run=files.id)
    tracking = Tracking(
        config.trackers,
        about,
        every=run.log_every,
        resumed_at=at,
        more=more,
        report=functools.partial(_write_report, files.path),
    )
    run.closing.callback(tracking.close, "failed")  # unless closed with the run's status
    return tracking


def _write_report(directory: Path) -> Path:
    # By name: the inspection of runs is built on this package.
    package = "jtrain.inspect.report"
    read_run = pkgutil.resolve_name(f"{package}.read_run:read_run")
    page = pkgutil.resolve_name(f"{package}.page:render_page")([read_run(directory)])
    path = directory / "report.html"
    atomic_write(path, page.encode("utf-8", "replace"))
    return path


def set_grace_budget(run: Attempt, speed: Speed) -> None:
    """Let the signals know the calls in flight, and the time that a call takes."""
    budget, schedule = run.signals.budget, run.resume.schedule
    budget.in_flight = schedule.in_flight
    budget.call = lambda: schedule.longest * speed.pace.seconds_per_step if speed.pace else 0.0


class ShowEvery(Hook):
    """Hook that shows what a model makes after steps `every`, 2 `every`, ... and at the end.

    Args:
        every: steps; 0: only at the end.
        make: of the parameters, the extra and a key; called in the first process.
        write: writes what was made at a step, and returns it as trackers take it.
        doing: names the work in the times of the run.
    """

    def __init__(
        self,
        run: Attempt,
        pause: Pause,
        tracking: Tracking | None,
        every: int,
        make: Callable[..., Any],
        write: Callable[[int, Any], Mapping[str, Any]],
        doing: str,
    ):
        self.every = every or run.config.steps
        self.newest: Mapping[str, Any] = {}
        """What was shown last; nothing in processes other than the first."""
        self._run, self._pause, self._doing, self._tracking = run, pause, doing, tracking
        self._make, self._write, self._shown = make, write, 0

    def on_state(self, step: int, state: TrainState) -> None:
        """Show the state, unless it was shown already. Every process calls this."""
        if step == self._shown:
            return
        self._shown, program = step, self._run.program
        with self._pause(self._doing):
            weights_and_key = program.gather_weights(state)
            first = self._run.files is not None and self._run.files.first
            made = self._make(*weights_and_key) if first else None
            barrier()
        if made:
            self.newest = self._write(step, made)
            if self._tracking is not None:
                self._tracking.show(step, self.newest)


def show_results(
    run: Attempt, pause: Pause, tracking: Tracking | None
) -> tuple[ShowEvery | None, ShowEvery | None]:
    """Return the hooks for the experiment's pictures and its samples, each if it has them."""
    config, x, files = run.config, run.program.resolved.experiment, run.files
    if not files:
        return None, None

    def draw(step: int, drawn: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(zip(drawn, write_pictures(files.pictures, step, drawn), strict=True))

    def write(step: int, text: str) -> Mapping[str, Any]:
        _write_sample(files.samples, text)
        if step < config.steps:  # the last one is printed by the caller
            LOG.info(f"sample after step {step}: {text}")
        return {"sample": text}

    make = functools.partial(ShowEvery, run, pause, tracking)
    return (
        x.pictures and make(config.log.pictures, x.pictures, draw, "drawing"),
        x.sample and make(config.sample.every, x.sample, write, "sampling"),
    )


def prepare_own_hooks(
    run: Attempt, given: Sequence[Hook], evaluations: Mapping[str, EvaluateEvery]
) -> list[Hook]:
    """Return the caller's hooks, and the early stop that the config asks for."""
    config = run.config
    stops = config.evaluate.patience and EarlyStop(config.checkpoint.best, config.evaluate.patience)
    hooks = [*given, stops] if stops else [*given]
    add_listeners(evaluations, hooks)
    return hooks


def _write_sample(path: Path, text: str) -> None:
    try:
        with open_regular(path, "wb") as file:
            file.write(f"{text}\n".encode("utf-8", "replace"))
    except OSError as error:
        advice = disk_advice(error, path).words
        LOG.warning(f"the sample could not be written to {path} ({error.strerror}). {advice}.")
