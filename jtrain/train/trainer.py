"""Trainer: the hooks of a run, the loop that calls them, and the end of the run."""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jtrain.checkpoint import SaveRetries
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
from jtrain.distributed.cpu_threads import count_cpu_devices, pool_advice
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import barrier
from jtrain.distributed.watchdog import DeadlockWatch
from jtrain.io.log import LOG, RunLog
from jtrain.train import run_hooks
from jtrain.train.banner import log_banner
from jtrain.train.failure import explain_failure
from jtrain.train.hooks.bad_step_log import BadStepLog
from jtrain.train.hooks.evaluation import (
    EvaluationResult,
    Results,
    latest_number,
)
from jtrain.train.hooks.log import LogHook, MetricHistory, MetricsFile
from jtrain.train.hooks.profile_window import ProfileWindow
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.signals import Signals
from jtrain.train.hooks.speed import TimeRows
from jtrain.train.program import Program
from jtrain.train.rollback import ResumePoint, decide_rollback
from jtrain.train.run_hooks import Attempt
from jtrain.train.run_result import Status
from jtrain.train.run_store import DirectoryStore, MemoryStore, RunStore, StartedRun
from jtrain.train.runtime import explain_leaked_tracer
from jtrain.train.save import CheckpointSaver, SaveHook

STATUS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}
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
        own_hooks: Sequence[Hook] = (),
    ):
        with contextlib.ExitStack() as closing:  # closes the files, if the next cannot be opened
            self.run = Attempt(program, resume, store, signals, log, closing)
            self._make_hooks(state, own_hooks)
            self._closing = closing.pop_all()

    def _make_hooks(self, state: TrainState, own_hooks: Sequence[Hook]) -> None:
        """Make the recorders and the hooks; they are called in the order of the two lists."""
        run, config = self.run, self.run.config
        at, every, files = run.resume.start, run.log_every, run.writes
        self.evaluations = run_hooks.make_evaluations(run, self.pause, self._write_results)
        self.best = run_hooks.find_best(run, self.evaluations)
        self.record = run_hooks.record_steps(run)
        self.events = BadStepLog(files and files.events, resumed_at=at)
        run.closing.callback(self.events.close)
        self.bad_steps = run_hooks.judge_steps(run, self.events, state)
        self.recompute = RecomputeCheck(
            every=config.checks.recompute, after=run.resume.schedule.after, start=run.start
        )
        self.feed = run_hooks.read_ahead(run, self.record)
        self.speed = run_hooks.measure_speed(run, self.feed)
        self.history = MetricHistory(every=every)
        self.metrics: MetricsFile | MetricHistory = self.history
        if files:
            self.metrics = MetricsFile(files.metrics, every=every, resumed_at=at)
            run.closing.callback(self.metrics.close)
        self.times = TimeRows(files.times, start=run.start) if files else None
        if self.times:
            run.closing.callback(self.times.close)
        self.progress = run_hooks.show_progress(run, self.speed, self.evaluations)
        self.tracking = run_hooks.track(run, self.speed)
        self.leaves = run_hooks.log_leaves(run, self.pause)
        self.pictures = run_hooks.draw_pictures(run, self.pause)
        self.save, self.retries = self._make_save()
        self.own_hooks = run_hooks.prepare_own_hooks(run, own_hooks, self.evaluations)
        newest = lambda: latest_number(run_hooks.main_results(self.evaluations))
        recorders = [
            HooksPhase(),
            self.speed,
            self.record,
            self.bad_steps,
            self.save,
        ]
        hooks = [
            # Observers of the numbers.
            self.speed,
            LogHook(
                every=every,
                stop=config.steps,
                speed=self.speed,
                valid=newest if self.evaluations else None,
                learning_rate=config.optimizer.learning_rate(config.steps),
            ),
            self.progress,
            self.metrics,
            self.tracking,
            run_hooks.watch_grace_period(run, self.speed) if run.files else None,
            # What takes the state: evaluations, the caller's hooks, and the save.
            self.leaves,
            *self.evaluations.values(),
            *self.own_hooks,
            self.pictures if config.log.pictures else None,
            self.save,
        ]
        self.recorders: list[Recorder] = [recorder for recorder in recorders if recorder]
        self.hooks: list[Hook] = [hook for hook in hooks if hook]

    def __enter__(self) -> "Trainer":
        self.run.log.display = self.progress
        self._closing.callback(lambda: setattr(self.run.log, "display", None))
        self._closing.enter_context(self.progress)
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def train(self, step: StepFn, state: TrainState) -> LoopResult[TrainState]:
        """Train from `state` on; return the last state, and why it stopped early if it did."""
        resume, resolved = self.run.resume, self.run.program.resolved
        with self._watch_deadlocks():
            log_banner(self.run.program, resume)
            try:
                self._catch_up(state)
            except StoppedError as asked:
                return LoopResult(state, self.run.start, asked.stop)
            over = self._verdict() if self.run.start else None
            for hook in self.own_hooks:
                if isinstance(hook, ProfileWindow):
                    step = hook.wrap(step, resume.schedule.after, self.run.start)
            try:
                ended = self._loop()(
                    self.recompute.wrap(step) if self.run.config.checks.recompute else step,
                    state,
                    self.run.signals.through(self.feed),
                    start=self.run.start,
                    stop=self.run.start if over else self.run.config.steps,
                    **self.loop_options(),
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
            stop = explain_failure(self.run, self.bad_steps, stop, ended.step)
        return dataclasses.replace(ended, stop=stop)

    def loop_options(self) -> dict[str, Any]:
        """Return what `train_loop` calls, and how often, as its arguments."""
        schedule = self.run.resume.schedule
        return {
            "hooks": self.hooks,
            "recorders": self.recorders,
            "between": self._between_calls,
            "steps_per_call": schedule.steps_per_call,
            "in_flight": schedule.in_flight,
            "record_every": self.run.record_every,
        }

    def finish(self, ended: LoopResult[TrainState]) -> TrainedRun:
        """Evaluate and save the last state, record the status, and write sample and pictures."""
        stop, sample, store = ended.stop or Stop("", "finished"), "", self.run.store
        try:
            if stop.kind == "finished":
                for evaluation in self.evaluations.values():
                    evaluation.at(ended.step, ended.state)
            self.save.at(ended.step, ended.state)
            if stop.kind == "finished":
                sample = run_hooks.show_sample(self.run, self.pause, self.pictures, ended)
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

    def _between_calls(self, step: int) -> None:
        """Do what each call costs the host; raise StoppedError if a signal came to any process."""
        HEARTBEAT.at(step)
        self.run.signals.check_peers()
        if self.times:
            self.times.tick(step)

    def _loop(self) -> Callable[..., LoopResult[TrainState]]:
        """Return the loop of the strategy, by its address: it may need what is built on a run."""
        loop = pkgutil.resolve_name(self.run.program.resolved.strategy.loop)
        if loop is train_loop:
            return train_loop
        directory = self.run.files and self.run.files.path
        return functools.partial(loop, program=self.run.program, directory=directory)

    def _watch_deadlocks(self) -> contextlib.AbstractContextManager[None]:
        """Return a watch over several CPU devices of one process; others wait for peers."""
        devices = count_cpu_devices(self.run.program.resolved.devices)
        alone = jax.process_count() == 1 and devices > 1
        return DeadlockWatch(pool_advice(devices)) if alone else contextlib.nullcontext()

    def _catch_up(self, state: TrainState) -> None:
        """Evaluate what was due at the step that a run resumes from, and was skipped for a signal.

        Not at the last step, which is evaluated in any case.
        """
        step = self.run.start
        if not step or step == self.run.config.steps:
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

    def _write_results(self, step: int, name: str, numbers: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation set to the metrics file and the trackers."""
        self.metrics.row(step, name, numbers)
        if self.tracking is not None:
            self.tracking.row(step, name, numbers)

    def _make_save(self) -> tuple[SaveHook, SaveRetries | None]:
        """Return the hook that saves the state; in memory it keeps that of the best evaluation."""
        store, config = self.run.store, self.run.config
        if isinstance(store, MemoryStore):
            hold = store.holder(self.run.program, self.best)
            return SaveHook(every=config.steps, save=hold, best=self.best), None
        # Files whose rows are on the disk before a checkpoint is; not the timings.
        written = [self.metrics, self.record, self.leaves]
        retries = SaveRetries(store.checkpoints, LOG.warning)
        saver = CheckpointSaver(
            self.run.program.resolved,
            store.run_dir,
            retries,
            resume=self.run.resume,
            bad_steps=self.bad_steps,
            results={name: each.results for name, each in self.evaluations.items()},
            best=self.best,
            files=[rows for each in written if (rows := getattr(each, "rows", None))],
            record=self.record,
            recompute=self.recompute,
            pause=self.pause,
            budget=self.run.signals.budget,
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
