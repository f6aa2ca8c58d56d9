"""Hooks of a run: logging, metrics, evaluation, the guard against bad steps, checkpoints."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager, SaveRetries
from jtrain.checkpoint.retention import BestMetric
from jtrain.config.durations import Duration
from jtrain.core.loop import Hook, Stop
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Extra, Params
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import barrier
from jtrain.io.jsonl import JsonlWriter
from jtrain.io.lost_files import LostFiles
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.checkpointing import RetrySave, SaveBest, SaveEvery
from jtrain.train.hooks.early_stop import EarlyStop
from jtrain.train.hooks.evaluation import EvaluateEvery, add_listeners
from jtrain.train.hooks.fault_injection import fault_hooks
from jtrain.train.hooks.function_hooks import Observer, to_hook
from jtrain.train.hooks.grace_period import GracePeriod
from jtrain.train.hooks.heartbeat import HeartbeatHook
from jtrain.train.hooks.history import MetricHistory
from jtrain.train.hooks.leaf_log import LeafLog
from jtrain.train.hooks.log import LogHook, LogLines
from jtrain.train.hooks.metrics import Metrics, read_results
from jtrain.train.hooks.pictures import Pictures
from jtrain.train.hooks.progress import ProgressBar
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.speed import Speed
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.leaf_statistics import build_leaf_log
from jtrain.train.longer_run import LengthChange
from jtrain.train.run_dir import RunDir
from jtrain.train.run_trackers import build_tracking
from jtrain.train.save_state import CheckpointSaver
from jtrain.train.setup import TrainSetup
from jtrain.train.trackers import End

_PHASES = {
    "saving": "save",
    "sampling": "sampling",
    "drawing": "sampling",
}  # as the heartbeat names them


class RunHooks:
    """Observers of a run from `start` on; a context manager.

    Without a directory and checkpoints, metrics stay in memory and nothing is written.

    Args:
        start: the step of the checkpoint that the run resumes from; None for a new run.
        earlier, known: as `BadStepPolicy` takes them.
        extended: the changes of the run's length before `start`.
        screen: stream that the log is printed to.
        copy: as `CheckpointSaver` takes it.
    """

    def __init__(
        self,
        setup: TrainSetup,
        directory: RunDir | None = None,
        checkpoints: CheckpointManager | None = None,
        *,
        start: int | None = None,
        earlier: Sequence[int] = (),
        known: Mapping[str, Any] = {},
        extended: Sequence[LengthChange] = (),
        screen: TextIO | None = None,
        copy: Callable[[int], None] = lambda step: None,
    ):
        config, x = setup.config, setup.experiment
        every = min(config.log.every, config.steps)  # a short run says something too
        first = directory if directory and directory.first else None  # the process that writes
        lost = directory.lost if directory else LostFiles()
        self._setup, self._directory, self._extended = setup, directory, extended
        self.waited = lambda: 0.0
        """Return the seconds that the loop has waited for data; set by the reader."""
        self.reading: Callable[[Iterable[Batch], str], Iterable[Batch]] = lambda batches, _: batches
        """Pass on the batches of an evaluation, and handle signals between them; set likewise."""
        self._stack = contextlib.ExitStack()
        if directory and not first:
            screen = io.StringIO()  # one process prints
        self.speed = Speed(
            first and first.speed,
            every=every,
            stop=config.steps,
            rows=config.batch,
            tokens=config.batch * x.tokens or None,
            waited=lambda: self.waited(),
            resumed_at=start,
            steps_per_call=config.steps_per_call,
            lost=lost,
        )
        self.history = MetricHistory(every=every)
        """Metrics in memory, where there is no directory or another process writes in it."""
        self.metrics = (
            Metrics(first.metrics, every=every, resumed_at=start, lost=lost)
            if first
            else self.history
        )
        call = config.steps_per_call
        self.record = directory and StepRecorder(
            first and first.steps, every=call, resumed_at=start, lost=lost
        )
        """Record of every step, where there is a directory."""
        self.twice = RecomputeCheck.build(
            config.checks.recompute, steps_per_call=call, start=start or 0
        )
        """Check that computes some steps twice, if configured."""
        for file in (self.record, self.speed, self.metrics):
            self._stack.callback(file.close if file else lambda: None)
        self.guarded = self._stack.enter_context(
            BadStepPolicy(setup, directory, start=start, earlier=earlier, known=known)
        )
        """Policy for bad steps."""
        self.evaluations = {
            name: self._evaluation(setup, directory, name, start) for name in setup.sets
        }
        """Evaluations by set, the main one first."""
        judged = next(iter(self.evaluations.values()), None)
        valid = judged.latest if judged else None
        self.progress = ProgressBar(
            start=start or 0,
            stop=config.steps,
            speed=self.speed,
            valid=valid,
            steps_per_call=config.steps_per_call,
            stream=screen,
        )
        log, progress = directory and directory.log, self.progress
        self.lines = LogLines(log, screen=progress.print, live=progress.live)
        self.retries = checkpoints and SaveRetries(checkpoints, self.lines.print)
        self.keep = directory and self.retries and self._keep(setup, directory, self.retries, copy)
        self.save = _save(config, self.keep or self._hold)
        self.held: tuple[Params, Extra] | None = None
        """Best weights, where a best is retained and there is no directory for it."""
        self._log = LogHook(
            every=every,
            stop=config.steps,
            log=self.lines.note,
            speed=self.speed,
            valid=valid,
            learning_rate=config.optimizer.learning_rate(config.steps),
        )
        self.grace = GracePeriod(
            config.checkpoint.grace,
            every=every,
            call=lambda: self.speed.pace and call * self.speed.pace.seconds_per_step,
            save=lambda: self.keep and self.keep.seconds,
            cadence=_often(config),
            log=self.lines.print,
        )
        self._looks: list[LeafLog] = []
        self._tracking: Tracking | None = None
        if directory and config.log.leaves:
            self._looks.append(
                build_leaf_log(setup, first and first.leaves, self.pause, start, lost)
            )
            self._stack.callback(self._looks[0].close)
        self.pictures: Pictures | None = None
        """Pictures of a state, where the experiment draws them and there is a directory."""
        if directory and x.pictures is not None:
            self.pictures = self._pictures(directory, x.pictures)
        if first and config.trackers:
            self._tracking = build_tracking(
                config,
                first.path,
                self.speed,
                run=first.id,
                log=self.lines.print,
                resumed_at=start,
            )
            self._stack.callback(self._tracking.close, "failed")  # unless `ended` was called

    def hooks(self, own: Sequence[Observer], state: TrainState) -> list[Hook]:
        """Return all hooks in the order they are called, `own` before those that save.

        Raises:
            ConfigError: if one of `own` is no hook, or waits for a set that does not exist.
        """
        config = self._setup.config
        mine = [to_hook(each, steps_per_call=config.steps_per_call) for each in own]
        if config.evaluate.patience:
            mine.append(EarlyStop(config.checkpoint.best, config.evaluate.patience))
        steps = [change.step for change in self._extended]
        mine = [each.extended(steps) if isinstance(each, EarlyStop) else each for each in mine]
        evaluations = add_listeners(self.evaluations, mine)
        guards = self.guarded.hooks(state, every=self._log.every, tell=self.lines.print)
        best = self.best()
        return [
            HeartbeatHook(every=config.steps_per_call),
            *fault_hooks(),
            *(self.speed, self._log, self.progress, self.metrics),
            *([self.record] if self.record else []),
            *([self.twice] if self.twice else []),
            *([self._tracking] if self._tracking else []),
            *([self.grace] if self._directory else []),
            *(*guards, *self._looks, *evaluations, *mine),
            *([self.pictures] if self.pictures and config.log.pictures else []),
            *([SaveBest(best, self.save)] if best else []),
            *([self.save] if self._directory else []),
            *([RetrySave(self.retries.is_due, self.save)] if self.retries else []),
        ]

    def saw(self, call: int, batch: Batch) -> None:
        """Receive the batch of a call before the call, the first being 0; on any thread."""
        for takes in (self.record and self.record.observe, self.guarded.saw):
            if takes:
                takes(call, batch)

    def settle(self, step: int, state: TrainState) -> None:
        """Wait until pending saves are on the disk; save `state` where one could not be written."""
        while self.retries and self.retries.settle():
            self.save.again(step, state)

    def catch_up(self, step: int | None, state: TrainState) -> None:
        """Evaluate what was due at the step that a run resumes from, and was skipped for a signal.

        Call it after `hooks`.
        """
        if not step or step == self._setup.config.steps:
            return  # the last step is evaluated in any case
        due = [
            x for x in self.evaluations.values() if step % x.every == 0 and step not in x.results
        ]
        for evaluation in due:
            evaluation.at(step, state)
        best = self.best()
        if best in due and best is not None and best.best and best.best.step == step:
            self.save.at(step, state)

    def over(self) -> Stop | None:
        """Return why a resumed run is done already, if its earlier evaluations say so."""
        return next((stop for each in self.evaluations.values() if (stop := each.verdict())), None)

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Show an activity beside training, and exclude its time from the speed."""
        with (
            self.speed.pause(),
            self.progress.during(what),
            HEARTBEAT.during(_PHASES.get(what, "eval")),
        ):
            yield

    def __enter__(self) -> "RunHooks":
        self._stack.enter_context(self.progress)
        if self._directory:
            self._directory.lost.send_to(self.lines.print)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _evaluation(
        self, setup: TrainSetup, directory: RunDir | None, name: str, start: int | None
    ) -> EvaluateEvery:
        asked = setup.config.evaluate
        every = asked.sets[name].every if name in asked.sets else asked.every

        def measure(state: TrainState) -> dict[str, float]:
            with self.pause("evaluating"):
                return setup.measure(state, name, lambda batches: self.reading(batches, "eval"))

        return EvaluateEvery(
            every=every or setup.config.steps,
            measure=measure,
            log=lambda step, numbers: self._results(step, name, numbers),
            name=name,
            best=setup.config.checkpoint.best.replace(f"{name}/", ""),
            # Another process may not yet have cut off what came after the checkpoint.
            earlier={
                step: numbers
                for step, numbers in (
                    read_results(directory.metrics, name) if directory else {}
                ).items()
                if start is not None and step <= start
            },
        )

    def _results(self, step: int, name: str, numbers: Mapping[str, float]) -> None:
        self.metrics.row(step, name, numbers)
        if self._tracking:
            self._tracking.row(step, name, numbers)

    def _pictures(self, directory: RunDir, make: Callable[..., Mapping[str, Any]]) -> Pictures:
        def draw(state: TrainState) -> Mapping[str, Any]:
            with self.pause("drawing"):
                here = self._setup.here(state)
                made = make(*here) if directory.first else {}
                barrier()
                return made

        every = self._setup.config.log.pictures or self._setup.config.steps
        return Pictures(directory.pictures, every=every, draw=draw)

    def ended(self, status: End) -> None:
        """Send the trackers the run's status, and wait a little for them."""
        if self._tracking:
            self._tracking.close(status)

    def best(self) -> EvaluateEvery | None:
        """Return the evaluation whose best is retained; None if none is."""
        goal = BestMetric.parse(self._setup.config.checkpoint.best)
        if goal is None or not self.evaluations:
            return None
        name, _, _ = goal.name.rpartition("/")
        return self.evaluations.get(name) or next(iter(self.evaluations.values()))

    def _keep(
        self,
        setup: TrainSetup,
        directory: RunDir,
        retries: SaveRetries,
        copy: Callable[[int], None],
    ) -> CheckpointSaver:
        return CheckpointSaver(
            setup,
            directory,
            retries,
            guarded=self.guarded,
            extended=self._extended,
            evaluations=self.evaluations,
            best=self.best,
            files=self._files,
            record=self.record,
            twice=self.twice,
            pause=self.pause,
            copy=copy,
        )

    def _files(self) -> list[JsonlWriter]:
        """Return the files of rows that belong to a checkpoint; timings do not."""
        of = (self.metrics, self.record, *self._looks, self.guarded.events)
        return [rows for each in of if (rows := getattr(each, "rows", None))]

    def _hold(self, step: int, state: TrainState) -> None:
        del step
        weights = self._setup.evaluation_params(state), state.extra
        self.held = jax.tree.map(jnp.copy, weights)


def _save(config: RunConfig, keep: Callable[[int, TrainState], None]) -> SaveEvery:
    often = config.checkpoint.every
    if isinstance(often, Duration):  # in time
        return SaveEvery(every=config.steps_per_call, save=keep, seconds=often.seconds)
    return SaveEvery(every=often or config.steps, save=keep)


def _often(config: RunConfig) -> str:
    often = config.checkpoint.every
    return str(often) if isinstance(often, Duration) else f"{often or config.steps} steps"
