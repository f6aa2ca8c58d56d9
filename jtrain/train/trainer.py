"""Trainer: the hooks of a run, the loop that calls them, and the end of the run."""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import SaveRetries
from jtrain.checkpoint.retention import BestMetric
from jtrain.config.durations import Duration
from jtrain.core.loop import (
    FinishedSteps,
    Hook,
    LoopResult,
    Recorder,
    Rollback,
    Stop,
    StoppedError,
    train_loop,
)
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.data.batches.scan import describe_nonfinite
from jtrain.distributed.cpu_threads import count_cpu_devices, pool_advice
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import all_gather, barrier
from jtrain.distributed.watchdog import DeadlockWatch
from jtrain.io.disk_errors import disk_advice
from jtrain.io.log import LOG, RunLog
from jtrain.io.regular_files import open_regular
from jtrain.train.banner import log_banner
from jtrain.train.hooks.bad_steps import BadStepLog, BadSteps, StepRows, advise
from jtrain.train.hooks.early_stop import EarlyStop
from jtrain.train.hooks.evaluation import (
    EvaluateEvery,
    EvaluationResult,
    Results,
    add_listeners,
    latest_number,
)
from jtrain.train.hooks.log import LogHook, MetricHistory, MetricsFile, read_results
from jtrain.train.hooks.profile_window import ProfileWindow
from jtrain.train.hooks.progress import ProgressBar
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.samples import Pictures
from jtrain.train.hooks.signals import GracePeriod, Signals
from jtrain.train.hooks.speed import Speed, TimeRows, measure_memory
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.hooks.tracking import build_tracking
from jtrain.train.leaf_statistics import LeafLog
from jtrain.train.program import Program
from jtrain.train.rollback import ResumePoint, decide_rollback
from jtrain.train.run_result import Status
from jtrain.train.run_store import DirectoryStore, MemoryStore, RunStore, StartedRun
from jtrain.train.runtime import explain_leaked_tracer
from jtrain.train.save import CheckpointSaver, SaveHook
from jtrain.train.summary import measure_work

STATUS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}
RECORDED = 16  # short steps between two looks at the numbers of all steps
SHORT = 1e-3  # seconds of a step, by the size of its state, whose numbers may wait for others
# Phases of the heartbeat, by what the progress bar shows; an evaluation is `eval`.
PHASES = {"saving": "save", "sampling": "sampling", "drawing": "sampling"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """End of a run: its status and last state, and what was measured."""

    status: Status
    why: str
    """Why it ended before its last step, or failed."""
    ended: LoopResult[TrainState]
    checkpoint: int | None
    """Step of the newest checkpoint."""
    results: Mapping[str, Results]
    """Metrics by set and step of evaluation."""
    best: EvaluationResult | None
    """Best evaluation, if a best is retained."""
    history: MetricHistory
    """Metrics in memory, of a run that has no directory."""
    sample: str
    """Text that the experiment sampled; empty if there is none."""


def train_to_end(
    program: Program,
    started: StartedRun,
    store: RunStore,
    signals: Signals,
    log: RunLog,
    hooks: Sequence[Hook] = (),
) -> TrainedRun:
    """Train a run until it ends, resuming after each rollback.

    Args:
        hooks: of the caller.
    """
    resume, step, state = started
    while True:
        with Trainer(program, resume, state, store, signals, log, hooks) as trainer:
            ended = trainer.train(step, state)
            if not isinstance(ended.stop, Rollback) or isinstance(store, MemoryStore):
                return trainer.finish(ended)
            trainer.end_tracking("stopped")
            decide_rollback(resume.batches, trainer.bad_steps, ended.stop)
        del state, ended  # frees memory for the next state
        resume, state = store.restart(program, resume.schedule)


class HooksPhase(Recorder):
    """Recorder that reports the phase of the hooks, so that one that hangs is noticed."""

    def on_steps(self, finished: FinishedSteps) -> None:
        """Report the phase; the next call ends it."""
        HEARTBEAT.phase("hooks")


class Trainer:
    """Training of a run, from its start or a resume to its end or a rollback; a context manager.

    Args:
        resume: where the run starts.
        state: at that step.
        store: of a run in memory, metrics stay in memory and nothing is written.
        own_hooks: of the caller.

    Raises:
        ConfigError: if a hook of the caller waits for a set that does not exist.
    """

    def __init__(
        self,
        program: Program,
        resume: ResumePoint,
        state: TrainState,
        store: RunStore,
        signals: Signals,
        log: RunLog,
        own_hooks: Sequence[Hook],
    ):
        self._program, self._resume, self._store, self._signals = program, resume, store, signals
        self._config, self._files = program.resolved.config, store.run_dir
        self._writes = self._files if self._files and self._files.first else None
        self._start, self._log, self._own_hooks = resume.start or 0, log, own_hooks
        self._stack = contextlib.ExitStack()
        with self._stack:  # closes what was opened, if the next one cannot be
            self._make_hooks(state)
            self._stack = self._stack.pop_all()

    def _make_hooks(self, state: TrainState) -> None:
        """Make the recorders and the hooks; they are called in the order of the two lists."""
        config, closing = self._config, self._stack.callback
        self.evaluations = self._evaluate()
        self.best = self._best_evaluation()
        self.record = self._record_steps()
        self.bad_steps = self._guard(state)
        self.recompute = RecomputeCheck(
            every=config.checks.recompute, after=self._resume.schedule.after, start=self._start
        )
        self.feed = self._stack.enter_context(self._read_ahead())
        self.speed = self._measure_speed()
        self.history = MetricHistory(every=self.log_every)
        self.metrics: MetricsFile | MetricHistory = self.history
        if self._writes:
            path, at = self._writes.metrics, self._resume.start
            self.metrics = MetricsFile(path, every=self.log_every, resumed_at=at)
            closing(self.metrics.close)
        self.times = TimeRows(self._writes.times, start=self._start) if self._writes else None
        if self.times:
            closing(self.times.close)
        self.progress = self._show_progress()
        self.tracking = self._track()
        self.leaves = self._log_leaves()
        self.pictures = self._draw_pictures()
        self.save, self.retries = self._save()
        self._own_hooks = self._prepare_own_hooks()
        newest = lambda: latest_number(self._main_results())
        self.recorders: list[Recorder | None] = [
            HooksPhase(),
            self.speed,
            self.record,
            self.bad_steps,
            self.save,
        ]
        self.hooks: list[Hook | None] = [
            self.speed,
            LogHook(
                every=self.log_every,
                stop=config.steps,
                speed=self.speed,
                valid=newest if self.evaluations else None,
                learning_rate=config.optimizer.learning_rate(config.steps),
            ),
            self.progress,
            self.metrics,
            self.tracking,
            self._watch_grace_period() if self._files else None,
            self.leaves,
            *self.evaluations.values(),
            *self._own_hooks,
            self.pictures if config.log.pictures else None,
            self.save,
        ]

    def __enter__(self) -> "Trainer":
        self._log.display = self.progress
        self._stack.callback(lambda: setattr(self._log, "display", None))
        self._stack.enter_context(self.progress)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def train(self, step: StepFn, state: TrainState) -> LoopResult[TrainState]:
        """Train from `state` on; return the last state, and why it stopped early if it did."""
        resume, resolved = self._resume, self._program.resolved
        with self._watch_deadlocks():
            log_banner(self._program, resume)
            try:
                self._catch_up(state)
            except StoppedError as asked:
                return LoopResult(state, self._start, asked.stop)
            over = self._verdict() if self._start else None
            for hook in self._own_hooks:
                if isinstance(hook, ProfileWindow):
                    step = hook.wrap(step, resume.schedule.after, self._start)
            try:
                ended = self._loop()(
                    self.recompute.wrap(step) if self._config.checks.recompute else step,
                    state,
                    self._signals.through(self.feed),
                    start=self._start,
                    stop=self._start if over else self._config.steps,
                    hooks=[hook for hook in self.hooks if hook],
                    recorders=[recorder for recorder in self.recorders if recorder],
                    between=self._between_calls,
                    steps_per_call=resume.schedule.steps_per_call,
                    in_flight=resume.schedule.in_flight,
                    record_every=self._record_every,
                )
            except TypeError as error:
                explained = explain_leaked_tracer(error, resolved.experiment.loss)
                if explained is None:
                    raise
                raise explained from error
        bad = self.bad_steps.ended(ended.step)
        stop = ended.stop if ended.stop and ended.stop.kind != "finished" else bad or ended.stop
        stop = stop or over
        if stop is not None and stop.kind == "failed":
            stop = self._explain_failure(stop, ended.step)
        return dataclasses.replace(ended, stop=stop)

    def finish(self, ended: LoopResult[TrainState]) -> TrainedRun:
        """Evaluate and save the last state, record the status, and write sample and pictures."""
        stop, sample, store = ended.stop or Stop("", "finished"), "", self._store
        try:
            if stop.kind == "finished":
                for evaluation in self.evaluations.values():
                    evaluation.at(ended.step, ended.state)
            self.save.at(ended.step, ended.state)
            if stop.kind == "finished":
                sample = self._show_sample(ended)
        except StoppedError as asked:  # all steps are taken; the rest follows when it resumes
            stop = asked.stop
            self.save.at(ended.step, ended.state)
        with HEARTBEAT.during("save"):  # whatever was announced is on the disk
            while self.retries is not None and self.retries.settle():
                self.save.again(ended.step, ended.state)
        status, why, checkpoint = STATUS[stop.kind], stop.why, None
        if isinstance(store, DirectoryStore):
            store.run_dir.write_status(status, step=ended.step, why=why)
        self.end_tracking(status)
        # One process that exits may end all, and the first has more to do. A missing one is
        # ignored.
        with HEARTBEAT.during("end"), contextlib.suppress(RuntimeError, ValueError):
            barrier()
        if isinstance(store, DirectoryStore):
            checkpoint = store.finish()
        return TrainedRun(
            status=status,
            why=why,
            ended=ended,
            checkpoint=checkpoint,
            results={name: evaluation.results for name, evaluation in self.evaluations.items()},
            best=self.best and self.best.best,
            history=self.history,
            sample=sample,
        )

    def end_tracking(self, status: Status) -> None:
        """Send the run's status to the trackers, and wait a little for them."""
        if self.tracking is not None:
            self.tracking.close(status)

    @contextlib.contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Show an activity beside training, and exclude its time from the speed."""
        phase = PHASES.get(activity, "eval")
        with self.speed.pause(), self.progress.during(activity), HEARTBEAT.during(phase):
            yield

    @property
    def log_every(self) -> int:
        """Steps between two log lines; a short run logs its last step."""
        return min(self._config.log.every, self._config.steps)

    def _between_calls(self, step: int) -> None:
        """Do what each call costs the host; raise StoppedError if a signal came to any process."""
        HEARTBEAT.at(step)
        self._signals.check_peers()
        if self.times:
            self.times.tick(step)

    @property
    def _record_every(self) -> int:
        """Steps between two looks at the numbers of all steps, the same in every run."""
        schedule = self._resume.schedule
        calls = RECORDED // schedule.most if schedule.update_seconds < SHORT else 1
        return schedule.most * max(calls, 1)

    def _loop(self) -> Callable[..., LoopResult[TrainState]]:
        """Return the loop of the strategy, by its address: it may need what is built on a run."""
        loop = pkgutil.resolve_name(self._program.resolved.strategy.loop)
        if loop is train_loop:
            return train_loop
        directory = self._files and self._files.path
        return functools.partial(loop, program=self._program, directory=directory)

    def _watch_deadlocks(self) -> contextlib.AbstractContextManager[None]:
        """Return a watch over several CPU devices of one process; others wait for peers."""
        devices = count_cpu_devices(self._program.resolved.devices)
        alone = jax.process_count() == 1 and devices > 1
        return DeadlockWatch(pool_advice(devices)) if alone else contextlib.nullcontext()

    def _catch_up(self, state: TrainState) -> None:
        """Evaluate what was due at the step that a run resumes from, and was skipped for a signal.

        Not at the last step, which is evaluated in any case.
        """
        step = self._start
        if not step or step == self._config.steps:
            return
        evaluations = self.evaluations.values()
        due = [x for x in evaluations if step % x.every == 0 and step not in x.results]
        for evaluation in due:
            evaluation.at(step, state)
        best = self.best
        if best is not None and best in due and best.best and best.best.step == step:
            self.save.at(step, state)

    def _verdict(self) -> Stop | None:
        """Return why a resumed run is over already, if its earlier evaluations say so."""
        stops = (evaluation.verdict() for evaluation in self.evaluations.values())
        return next((stop for stop in stops if stop), None)

    def _explain_failure(self, stop: Stop, last: int) -> Stop:
        """Return the `Stop` of a failed run, with the data that explains it."""
        bad, batches = self.bad_steps.bad, self._resume.batches.train
        rows = StepRows(batches, self._program.resolved.experiment.train)
        window = min(getattr(self._config.guard, "window", 0), self._config.steps)
        first = max(1, last - window - 10 * self._record_every)
        rows_of = lambda step: rows.report(step).get("rows", ())
        blame = describe_nonfinite(batches, range(first, last + 1), rows_of)
        if bad:  # in every process, each of which has read rows of its own
            blame = next((each for each in all_gather(blame) if "every value" not in each), blame)
            number = rows.report(bad.step)["batch"]
            late = f"It was found at step {last}: numbers are read some calls late. "
            late = late if last > bad.step else ""
            blame = f"{late}{blame} {advise(self._config, bad, number)}"
        why = f"{stop.why} {blame}"
        if bad:
            self.bad_steps.record(bad, "stopped", why=why)
        return dataclasses.replace(stop, why=why)

    def _show_sample(self, ended: LoopResult[TrainState]) -> str:
        """Write the sample and draw the pictures; return the sample, empty if there is none."""
        make, files, text = self._program.resolved.experiment.sample, self._files, ""
        if files is None:
            return text
        if make is not None:
            with self.pause("sampling"), self._signals.interruptible():
                weights_and_key = self._program.gather_weights(ended.state)
                text = make(*weights_and_key) if files.first else ""
                barrier()
            if files.first:
                _write_sample(files.samples, text)
        if self.pictures is not None:
            with self._signals.interruptible():
                self.pictures.at(ended.step, ended.state)
        return text

    # The hooks, in the order in which they are made.

    def _evaluate(self) -> dict[str, EvaluateEvery]:
        """Return the hook that evaluates each set, the main one first."""
        config, sets = self._config, self._config.evaluate.sets

        def make(name: str) -> EvaluateEvery:
            every = sets[name].every if name in sets else config.evaluate.every

            def measure(state: TrainState) -> dict[str, float]:
                with self.pause("evaluating"):
                    reading = lambda batches: self._signals.through(batches, "eval")
                    return self._program.measure(state, name, reading)

            def write(step: int, numbers: Mapping[str, float]) -> None:
                self.metrics.row(step, name, numbers)
                if self.tracking is not None:
                    self.tracking.row(step, name, numbers)

            return EvaluateEvery(
                every=every or config.steps,
                measure=measure,
                log=write,
                name=name,
                best=config.checkpoint.best.replace(f"{name}/", ""),
                results=self._earlier_results(name),
            )

        return {name: make(name) for name in self._program.resolved.sets}

    def _earlier_results(self, name: str) -> dict[int, Mapping[str, float]]:
        """Return the results of a set up to the step that a run resumes from, by step, in order.

        Args:
            name: of the set; empty for the numbers of the training.
        """
        if self._files is None or self._resume.start is None:
            return {}
        # Another process may not yet have cut off what came after the checkpoint.
        results = read_results(self._files.metrics, name)
        return {step: results[step] for step in sorted(results) if step <= self._start}

    def _best_evaluation(self) -> EvaluateEvery | None:
        """Return the evaluation whose best is retained; None if none is."""
        goal = BestMetric.parse(self._config.checkpoint.best)
        if goal is None or not self.evaluations:
            return None
        name, _, _ = goal.name.rpartition("/")
        return self.evaluations.get(name) or next(iter(self.evaluations.values()))

    def _main_results(self) -> Results:
        """Return the results of the main set; empty if there is none."""
        main = next(iter(self.evaluations.values()), None)
        return main.results if main else {}

    def _record_steps(self) -> StepRecorder | None:
        """Return the record of every step, where there is a directory."""
        if self._files is None:
            return None
        path = self._files.steps if self._files.first else None
        record = StepRecorder(path, resumed_at=self._resume.start)
        self._stack.callback(record.close)
        return record

    def _guard(self, state: TrainState) -> BadSteps:
        """Return the recorder that judges each step."""
        resume = self._resume
        path = self._writes.events if self._writes else None
        self.events = BadStepLog(path, resumed_at=resume.start)
        self._stack.callback(self.events.close)
        return BadSteps(
            self._config,
            self.events,
            StepRows(resume.batches.train, self._program.resolved.experiment.train),
            every=self._record_every,
            start=self._start,
            skipped=int(state.skipped),
            earlier=resume.earlier,
            minimum=getattr(state.scale, "minimum", 0.0),
            known=resume.known,
        )

    def _read_ahead(self) -> Any:
        """Return the batches of the calls, on the devices; the record sees them first."""
        workers, schedule = self._config.workers, self._resume.schedule
        workers.check(self._program.resolved.experiment.train)
        place = lambda batch: self._program.place(batch, schedule)
        observe = self.record and self.record.observe
        return self._resume.batches.read_ahead(workers, self._start, place, observe)

    def _measure_speed(self) -> Speed:
        """Return the hook that measures the speed, whose pauses are those of the others."""
        config, resolved = self._config, self._program.resolved
        own = [x for x in resolved.devices if x.process_index == jax.process_index()]
        speed = Speed(
            self._writes and self._writes.speed,
            every=self.log_every,
            stop=config.steps,
            rows=config.batch,
            tokens=config.batch * resolved.experiment.tokens or None,
            work=measure_work(self._program) if self._writes else None,
            waited=lambda: self.feed.waited,
            memory=functools.partial(measure_memory, own),
            began=lambda: {"compile": HEARTBEAT.seconds()["compile"]},
            resumed_at=self._resume.start,
        )
        self._stack.callback(speed.close)
        return speed

    def _show_progress(self) -> ProgressBar:
        """Return the live display."""
        losses = lambda results: {n: x["loss"] for n, x in results.items() if "loss" in x}
        return ProgressBar(
            start=self._start,
            stop=self._config.steps,
            speed=self.speed,
            valid=lambda: losses(self._main_results()),
            earlier=lambda: losses(self._earlier_results("")),
            steps_per_call=self._resume.schedule.most,
            stream=self._log.stream,
        )

    def _track(self) -> Any:
        """Return the hook that sends numbers to the trackers, if there are any."""
        if self._writes is None or not self._config.trackers:
            return None
        tracking = build_tracking(
            self._config,
            self._writes.path,
            self.speed,
            run=self._writes.id,
            log=LOG.warning,
            resumed_at=self._resume.start,
        )
        self._stack.callback(tracking.close, "failed")  # unless closed with the run's status
        return tracking

    def _watch_grace_period(self) -> GracePeriod:
        """Return the hook that compares the time of a step and a save with the grace period."""
        cadence, schedule = self._config.checkpoint.every, self._resume.schedule
        self._signals.budget.in_flight = schedule.in_flight
        steps = f"{cadence or self._config.steps} steps"

        def seconds_per_call() -> float | None:
            pace = self.speed.pace
            return None if pace is None else schedule.most * pace.seconds_per_step

        return GracePeriod(
            self._signals.budget,
            every=self.log_every,
            call=seconds_per_call,
            cadence=str(cadence) if isinstance(cadence, Duration) else steps,
        )

    def _log_leaves(self) -> Any:
        """Return the hook that logs statistics of the leaves, if configured."""
        if self._files is None or not self._config.log.leaves:
            return None
        path = self._files.leaves if self._files.first else None
        log = LeafLog(self._program, path, self.pause, self._resume)
        self._stack.callback(log.close)
        return log

    def _draw_pictures(self) -> Pictures | None:
        """Return the hook that draws pictures, where the experiment has them."""
        make, files = self._program.resolved.experiment.pictures, self._files
        if files is None or make is None:
            return None

        def draw(state: TrainState) -> Mapping[str, Any]:
            with self.pause("drawing"):
                weights_and_key = self._program.gather_weights(state)
                drawn = make(*weights_and_key) if files.first else {}
                barrier()
                return drawn

        every = self._config.log.pictures or self._config.steps
        return Pictures(files.pictures, every=every, draw=draw)

    def _save(self) -> tuple[SaveHook, SaveRetries | None]:
        """Return the hook that saves the state; in memory it keeps that of the best evaluation."""
        store, config = self._store, self._config
        if isinstance(store, MemoryStore):
            hold = store.holder(self._program, self.best)
            return SaveHook(every=config.steps, save=hold, best=self.best), None
        # Files whose rows are on the disk before a checkpoint is; not the timings.
        written = [self.metrics, self.record, self.leaves]
        retries = SaveRetries(store.checkpoints, LOG.warning)
        saver = CheckpointSaver(
            self._program.resolved,
            store.run_dir,
            retries,
            resume=self._resume,
            bad_steps=self.bad_steps,
            results={name: each.results for name, each in self.evaluations.items()},
            best=self.best,
            files=[rows for each in written if (rows := getattr(each, "rows", None))],
            record=self.record,
            recompute=self.recompute,
            pause=self.pause,
            budget=self._signals.budget,
            copy=store.copy,
        )
        save = SaveHook(
            every=config.checkpoint.every or config.steps,
            save=saver,
            best=self.best,
            owed=retries.is_due,
            prepare=store.checkpoints.prepare,
        )
        return save, retries

    def _prepare_own_hooks(self) -> list[Hook]:
        """Return the caller's hooks, and the early stop that the config asks for."""
        config, hooks = self._config, list(self._own_hooks)
        if config.evaluate.patience:
            hooks.append(EarlyStop(config.checkpoint.best, config.evaluate.patience))
        for hook in hooks:
            if isinstance(hook, EarlyStop):
                hook.longer_from = [change.step for change in self._resume.extended]
        add_listeners(self.evaluations, hooks)
        return hooks


def _write_sample(path: Path, text: str) -> None:
    """Write the sample; a failure is logged, and the run is done all the same."""
    try:
        with open_regular(path, "wb") as file:
            file.write(f"{text}\n".encode("utf-8", "replace"))
    except OSError as error:
        advice = disk_advice(error, path).words
        LOG.warning(f"the sample could not be written to {path} ({error.strerror}). {advice}.")
