"""Trainer: the hooks of a run, the loop that calls them, and the end of the run."""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

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
from jtrain.train.hooks.evaluation import EvaluateEvery, EvaluationResult, Results
from jtrain.train.hooks.log import LogHook, MetricHistory, MetricsFile
from jtrain.train.hooks.profile_window import ProfileWindow
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.signals import Signals
from jtrain.train.hooks.speed import TimeRows
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.program import Program
from jtrain.train.rollback import ResumePoint, record_rollback
from jtrain.train.run_hooks import Attempt
from jtrain.train.run_result import Status
from jtrain.train.run_store import DirectoryStore, MemoryStore, RunStore, StartedRun
from jtrain.train.runtime import explain_leaked_tracer
from jtrain.train.save import CheckpointSaver, make_save_hook
from jtrain.train.summary import banner_lines

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
    results: Mapping[str, Results]
    """Metrics by set and step of evaluation."""
    best: EvaluationResult | None
    history: MetricHistory
    """Metrics in memory, where this process writes no metrics.jsonl."""
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
    """Train a run until it ends, resuming after each rollback."""
    resume, step_fn, state = started
    while True:
        with Trainer(program, resume, state, store, signals, log, hooks) as trainer:
            ended = trainer.train(step_fn, state)
            if not isinstance(ended.stop, Rollback):
                return trainer.finish(ended)
            if isinstance(store, MemoryStore):  # it has no checkpoint to roll back to
                failed = Stop(ended.stop.why, "failed")
                return trainer.finish(dataclasses.replace(ended, stop=failed))
            trainer.end_tracking("stopped")
            with HEARTBEAT.during("save"):  # if it failed, roll back all the same
                trainer.save_hook.wait(ended.step, ended.state)
            record_rollback(resume.batches, trainer.bad_steps, ended.stop)
        del state, ended  # frees memory for the next state
        resume, state = store.restart(program, resume.schedule)


class HooksPhase(Recorder):
    """Recorder that reports the phase of the hooks, so that one that hangs is noticed."""

    def on_steps(self, finished: FinishedSteps) -> None:
        """Report the phase, which ends when the loop waits for the next batch."""
        HEARTBEAT.phase("hooks")


class Trainer:
    """Training of a run, from its start or a resume to its end or a rollback; a context manager.

    Args:
        resume: where the run starts.
        state: at that step.
        store: where files go; a `MemoryStore` writes none, and metrics stay in memory.

    Raises:
        ConfigError: if a hook of the caller needs the results of a set that does not exist.
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
        with contextlib.ExitStack() as closing:  # closes the files if one of them cannot be opened
            self.attempt = Attempt(program, resume, store, signals, log, closing)
            self._make_hooks(state, own_hooks)
            self._closing = closing.pop_all()  # all of `attempt.closing`: register no more there

    def _make_hooks(self, state: TrainState, own_hooks: Sequence[Hook]) -> None:
        """Make the recorders and the hooks, each called in the order of its list.

        A call is one dispatch of the compiled step; it takes 1 to `steps_per_call` steps. Numbers
        come some calls late, and no device waits for them. At multiples of `record_every`, and
        before hooks that are due, the recorders get the numbers of all steps since the last time.

        At a step whose state a hook takes, the loop waits for all calls, then calls recorders,
        hooks of numbers and hooks of the state. A `Stop` by a hook of the state ends the loop at
        that step; one by a hook of numbers or a recorder after the calls that have started.
        (Several processes: `FinishedCalls._note`.) All hooks are called even after a `Stop`: a NaN
        state is evaluated, too.

        A signal is seen before the next call. In one process a signal during an evaluation also
        cuts that and the next; several processes finish them. `finish` saves the state; `_catch_up`
        evaluates on resume. A process of the command line whose save exceeds checkpoint.grace exits
        at once (`SignalGuard`).
        """
        attempt, config = self.attempt, self.attempt.config
        every, written = attempt.log_every, attempt.written_files
        self.evaluations = run_hooks.make_evaluations(attempt, self.pause, self._write_results)
        self.best_evaluation = run_hooks.find_best(attempt, self.evaluations)
        self.step_record: StepRecorder | None = None
        if attempt.files:
            self.step_record = StepRecorder(run_hooks.open_rows(attempt, attempt.files.steps))
        self.bad_steps = run_hooks.make_bad_steps(attempt, state)
        self.recompute = RecomputeCheck(
            every=config.checks.recompute, after=attempt.resume.schedule.after, start=attempt.start
        )
        self.feed = run_hooks.read_ahead(attempt, self.step_record)
        self.speed = run_hooks.measure_speed(attempt, self.feed)
        self.history = MetricHistory(every=every)
        self.metrics: MetricsFile | MetricHistory = self.history
        if rows := run_hooks.open_rows(attempt, written and written.metrics):
            self.metrics = MetricsFile(rows, every=every)
        self.times = TimeRows(written.times, start=attempt.start) if written else None
        if self.times:
            attempt.closing.callback(self.times.close)
        first_set = next(iter(self.evaluations.values()), None)
        valid = first_set and first_set.newest_loss
        self.progress = run_hooks.show_progress(attempt, self.speed, valid)
        self.tracking = run_hooks.track(attempt, self.speed)
        shown = run_hooks.show_results(attempt, self.pause, self.tracking)
        self.pictures, self.samples = shown
        run_hooks.set_grace_budget(attempt, self.speed)
        flushed = [self.metrics.rows, self.step_record and self.step_record.rows]
        make_saver = functools.partial(
            CheckpointSaver,
            attempt,
            bad_steps=self.bad_steps,
            evaluations=self.evaluations,
            best=self.best_evaluation,
            files=[rows for rows in flushed if rows],  # not the timings
            record=self.step_record,
            recompute=self.recompute,
            pause=self.pause,
        )
        self.save_hook = make_save_hook(attempt, self.best_evaluation, make_saver)
        self.own_hooks = run_hooks.prepare_own_hooks(attempt, own_hooks, self.evaluations)
        recorders = [  # of every step; some are hooks below, too
            HooksPhase(),
            self.speed,
            self.step_record,
            self.bad_steps,  # judges at multiples of `record_every`, and whenever a state is saved
            self.save_hook,  # prepares the first save; after one that failed the next state is due
        ]
        hooks = [
            # What takes numbers, at the steps that are logged; the progress at a pace of its own.
            self.speed,
            LogHook(
                every=every,
                stop=config.steps,
                speed=self.speed,
                valid=valid,  # of the evaluation before this step
                learning_rate=attempt.program.resolved.learning_rate,
            ),
            self.progress,
            self.metrics,
            self.tracking,
            # What takes the state, and the caller's hooks of any kind.
            *self.evaluations.values(),  # each calls the hooks that have `on_results`
            *self.own_hooks,
            # Without a cadence they are called at the end alone: see `finish`.
            self.pictures if config.log.pictures else None,
            self.samples if config.sample.every else None,
            # The save is last: a resume does not repeat what the others did at its step. A save to
            # a directory has bad_steps judge every step before, and writes nothing if one of them
            # stops the run or rolls it back; after a step that was skipped the state is good.
            self.save_hook,
        ]
        self.recorders: list[Recorder] = [recorder for recorder in recorders if recorder]
        self.hooks: list[Hook] = [hook for hook in hooks if hook]

    def __enter__(self) -> "Trainer":
        self.attempt.log.display = self.progress
        self._closing.callback(lambda: setattr(self.attempt.log, "display", None))
        self._closing.enter_context(self.progress)
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def train(self, step_fn: StepFn, state: TrainState) -> LoopResult[TrainState]:
        """Train from `state` on; return the last state, and why it stopped early if it did."""
        resume, config = self.attempt.resume, self.attempt.config
        with self._watch_deadlocks():
            for line in banner_lines(self.attempt.program.resolved, resume.schedule, resume.start):
                LOG.info(line)
            try:
                already_over = self._catch_up(state)  # by results so far
            except StoppedError as asked:
                return LoopResult(state, self.attempt.start, asked.stop)
            for hook in self.own_hooks:
                if isinstance(hook, ProfileWindow):
                    step_fn = hook.wrap(step_fn, resume.schedule.after, self.attempt.start)
            loop = self._strategy_loop()
            try:
                ended = loop(
                    self.recompute.wrap(step_fn) if config.checks.recompute else step_fn,
                    state,
                    self.attempt.signals.through(self.feed),
                    start=self.attempt.start,
                    # No step is taken where earlier results end the run.
                    stop=self.attempt.start if already_over else config.steps,
                    **self.loop_options(),
                )
            except TypeError as error:
                explained = explain_leaked_tracer(error)
                if explained is None:
                    raise
                raise explained from error
        late_stop = self.bad_steps.stop_at_end(ended.step)
        # First counts an interruption (a Rollback has that kind) or a failure, then a bad step that
        # the loop did not see, then an intended end.
        urgent = ended.stop if ended.stop and ended.stop.kind != "finished" else None
        stop = urgent or late_stop or ended.stop or already_over
        if stop is not None and stop.kind == "failed":
            stop = self.bad_steps.explain_failure(stop, last=ended.step)
        return dataclasses.replace(ended, stop=stop)

    def loop_options(self) -> dict[str, Any]:
        """Return what `train_loop` calls, and how often, as its arguments."""
        schedule = self.attempt.resume.schedule
        return {
            "hooks": self.hooks,
            "recorders": self.recorders,
            "between": self._between_step_calls,
            "steps_per_call": schedule.steps_per_call,
            "in_flight": schedule.in_flight,
            "record_every": self.attempt.record_every,
        }

    def finish(self, ended: LoopResult[TrainState]) -> TrainedRun:
        """Save the last state, and record the status.

        Of a run that is finished, the state is evaluated first, and sample and pictures are last.
        """
        stop, store = ended.stop or Stop("", "finished"), self.attempt.store
        try:
            if stop.kind == "finished":
                self._evaluate(self.evaluations.values(), ended.step, ended.state)
            self.save_hook.save_once(ended.step, ended.state)
            if stop.kind == "finished":
                with self.attempt.signals.interruptible():
                    for hook in filter(None, (self.samples, self.pictures)):
                        hook.on_state(ended.step, ended.state)
        except StoppedError as asked:  # a signal while it evaluates: the rest when it resumes
            stop = asked.stop
            self.save_hook.save_once(ended.step, ended.state)
        with HEARTBEAT.during("save"):
            self.save_hook.wait(ended.step, ended.state)
        status, why = STATUS[stop.kind], stop.why
        if isinstance(store, DirectoryStore):
            store.run_dir.write_status(status, step=ended.step, why=why)
        self.end_tracking(status)
        if isinstance(store, DirectoryStore):
            with HEARTBEAT.during("save"):
                store.finish()
        # No process exits before process 0 has uploaded, which may take as long as a save: JAX ends
        # a process when others exit. A process that is gone is not waited for.
        with HEARTBEAT.during("save"), contextlib.suppress(RuntimeError, ValueError):
            barrier()
        return TrainedRun(
            status=status,
            why=why,
            ended=ended,
            checkpoint=store.checkpoints.newest() if isinstance(store, DirectoryStore) else None,
            results={name: evaluation.results for name, evaluation in self.evaluations.items()},
            best=self.best_evaluation and self.best_evaluation.best,
            history=self.history,
            sample=self.samples.newest.get("sample", "") if self.samples else "",
        )

    def end_tracking(self, status: Status) -> None:
        """Send the run's status to the trackers, and wait a little for them."""
        if self.tracking is not None:
            self.tracking.close(status)

    @contextlib.contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Show an activity that interrupts training, and exclude its time from the speed."""
        phase = PHASES.get(activity, "eval")
        with self.speed.pause(), self.progress.during(activity), HEARTBEAT.during(phase):
            yield

    def _between_step_calls(self, step: int) -> None:
        HEARTBEAT.dispatched(step)
        self.attempt.signals.check()
        if self.times:
            self.times.tick(step)

    def _strategy_loop(self) -> Callable[..., LoopResult[TrainState]]:
        loop = pkgutil.resolve_name(self.attempt.program.resolved.strategy.loop)
        if loop is train_loop:
            return train_loop
        directory = self.attempt.files and self.attempt.files.path
        return functools.partial(loop, program=self.attempt.program, directory=directory)

    def _watch_deadlocks(self) -> contextlib.AbstractContextManager[None]:
        """Return a watch over several CPU devices of one process.

        Several processes may wait for one another, which is not a deadlock.
        """
        devices = count_cpu_devices(self.attempt.program.resolved.devices)
        alone = jax.process_count() == 1 and devices > 1
        return DeadlockWatch(pool_advice(devices)) if alone else contextlib.nullcontext()

    def _catch_up(self, state: TrainState) -> Stop | None:
        """Evaluate what was due at the step of a resume, where a signal ended the run.

        Not at the last step, which `finish` evaluates. Return a `Stop` for the results so far.
        """
        step, evaluations = self.attempt.start, self.evaluations.values()
        if step and step != self.attempt.config.steps:
            self._evaluate([each for each in evaluations if step % each.every == 0], step, state)
        return next(filter(None, (each.verdict() for each in evaluations)), None)

    def _evaluate(self, evaluations: Iterable[EvaluateEvery], step: int, state: TrainState) -> None:
        """Evaluate a state where it was not; save it if it is the best.

        It is saved again, so that its checkpoint holds the number that makes it the best.
        """
        missing = [each for each in evaluations if step not in each.results]
        for evaluation in missing:
            evaluation.measure_once(step, state)
        best = self.best_evaluation
        if best is not None and best in missing and best.is_best(step):
            self.save_hook.save_again(step, state)

    def _write_results(self, step: int, name: str, numbers: Mapping[str, Any]) -> None:
        self.metrics.row(step, name, numbers)
        if self.tracking is not None:
            self.tracking.row(step, name, numbers)
