"""Hooks of a run, in the order in which the loop calls them.

They measure (`run_measures`), check (`run_checks`), evaluate, and save (`save`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from jtrain.checkpoint.retention import BestMetric
from jtrain.core.loop import Hook, Stop
from jtrain.core.state import TrainState
from jtrain.distributed.multihost import barrier
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.early_stop import EarlyStop
from jtrain.train.hooks.evaluation import EvaluateEvery, add_listeners
from jtrain.train.hooks.function_hooks import HeartbeatHook
from jtrain.train.hooks.profile_window import ProfileWindow
from jtrain.train.hooks.samples import Pictures
from jtrain.train.hooks.signals import Signals
from jtrain.train.hooks.speed import TimeRows
from jtrain.train.leaf_statistics import LeafLog
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_checks import Checks, guard
from jtrain.train.run_dir import RunDir
from jtrain.train.run_measures import Measures, earlier_results, measure
from jtrain.train.run_store import RunStore
from jtrain.train.save import Saving, save, watch_grace_period
from jtrain.train.setup import TrainSetup
from jtrain.train.trackers import End


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunHooks:
    """Hooks of a run, from its start or a resume to its end or a rollback."""

    ordered: Sequence[Hook]
    """All hooks, in the order in which the loop calls them."""
    measures: Measures
    evaluations: Mapping[str, EvaluateEvery]
    """Evaluations by set, the main one first."""
    best: EvaluateEvery | None
    """The evaluation whose best is retained."""
    checks: Checks
    pictures: Pictures | None
    saving: Saving
    last_step: int

    def catch_up(self, step: int | None, state: TrainState) -> None:
        """Evaluate what was due at the step that a run resumes from, and was skipped for a signal.

        Not at the last step, which is evaluated in any case.
        """
        if not step or step == self.last_step:
            return
        evaluations = self.evaluations.values()
        due = [x for x in evaluations if step % x.every == 0 and step not in x.results]
        for evaluation in due:
            evaluation.at(step, state)
        best = self.best
        if best is not None and best in due and best.best and best.best.step == step:
            self.saving.every.at(step, state)

    def verdict(self) -> Stop | None:
        """Return why a resumed run is over already, if its earlier evaluations say so."""
        stops = (evaluation.verdict() for evaluation in self.evaluations.values())
        return next((stop for stop in stops if stop), None)

    def end_tracking(self, status: End) -> None:
        """Send the run's status to the trackers, and wait a little for them."""
        if self.measures.tracking is not None:
            self.measures.tracking.close(status)


@contextlib.contextmanager
def open_hooks(
    resume: ResumePoint,
    state: TrainState,
    store: RunStore,
    signals: Signals,
    *,
    screen: TextIO | None = None,
) -> Iterator[RunHooks]:
    """Make the hooks of a run from `resume` on, and close their files at the end of the block.

    Args:
        state: the state that the run resumes from.
        store: of a run in memory, metrics stay in memory and nothing is written.
        signals: the first of the hooks.
        screen: stream that the log is printed to; only the first process prints.

    Raises:
        ConfigError: if a hook of the caller waits for a set that does not exist.
    """
    config, run_dir = resume.setup.config, store.run_dir
    with contextlib.ExitStack() as stack:
        results = {name: earlier_results(run_dir, name, resume.start) for name in resume.setup.sets}
        checks = guard(resume, run_dir, stack)
        measures = measure(resume, run_dir, checks.feed, results, screen, stack)
        leaf_log = _log_leaves(resume, run_dir, measures, stack)
        evaluations = evaluate(resume.setup, measures, signals, results)
        best = _best_evaluation(config, evaluations)
        own_hooks = _own_hooks(resume)
        add_listeners(evaluations, own_hooks)
        pictures = _draw_pictures(resume.setup, run_dir, measures)
        saving = save(resume, store, measures, checks, leaf_log, results, best, signals.budget)
        grace = watch_grace_period(resume.setup, measures, signals.budget) if run_dir else None
        guards = checks.policy.hooks(state, every=measures.log.every, log=measures.lines.print)
        time_rows = _record_time(resume, run_dir, stack)
        stack.enter_context(measures.progress)
        ordered = [
            signals,
            HeartbeatHook(),
            time_rows,
            *(measures.speed, measures.log, measures.progress, measures.metrics),
            *(checks.record, checks.recompute, measures.tracking, grace),
            *guards,
            leaf_log,
            *evaluations.values(),
            *own_hooks,
            pictures if config.log.pictures else None,
            *saving.hooks,
        ]
        yield RunHooks(
            ordered=[hook for hook in ordered if hook is not None],
            measures=measures,
            evaluations=evaluations,
            best=best,
            checks=checks,
            pictures=pictures,
            saving=saving,
            last_step=config.steps,
        )


def evaluate(
    setup: TrainSetup,
    measures: Measures,
    signals: Signals,
    results: Mapping[str, dict[int, Mapping[str, float]]],
) -> dict[str, EvaluateEvery]:
    """Return the hook that evaluates each set, the main one first.

    Args:
        signals: handles a signal between two batches.
        results: so far, by set; each hook adds its own.
    """
    config, sets = setup.config, setup.config.evaluate.sets

    def make(name: str) -> EvaluateEvery:
        every = sets[name].every if name in sets else config.evaluate.every

        def measure_set(state: TrainState) -> dict[str, float]:
            with measures.pause("evaluating"):
                return setup.measure(state, name, lambda batches: signals.through(batches, "eval"))

        return EvaluateEvery(
            every=every or config.steps,
            measure=measure_set,
            log=lambda step, numbers: measures.write_results(step, name, numbers),
            name=name,
            best=config.checkpoint.best.replace(f"{name}/", ""),
            results=results[name],
        )

    return {name: make(name) for name in setup.sets}


def _record_time(
    resume: ResumePoint, run_dir: RunDir | None, stack: contextlib.ExitStack
) -> TimeRows | None:
    """Return the hook that records where the time goes, of the first process."""
    if run_dir is None or not run_dir.first:
        return None
    rows = TimeRows(run_dir.times, start=resume.start or 0)
    stack.callback(rows.close)
    return rows


def _log_leaves(
    resume: ResumePoint, run_dir: RunDir | None, measures: Measures, stack: contextlib.ExitStack
) -> LeafLog | None:
    """Return the hook that logs statistics of the leaves, if configured."""
    if run_dir is None or not resume.setup.config.log.leaves:
        return None
    path = run_dir.leaves if run_dir.first else None
    log = LeafLog(resume.setup, path, measures.pause, resume.start)
    stack.callback(log.close)
    return log


def _own_hooks(resume: ResumePoint) -> list[Hook]:
    """Return the caller's hooks, and the early stop that the config asks for."""
    config, hooks = resume.setup.config, list(resume.setup.hooks)
    if config.evaluate.patience:
        hooks.append(EarlyStop(config.checkpoint.best, config.evaluate.patience))
    for hook in hooks:
        if isinstance(hook, ProfileWindow):
            hook.follow(resume.setup.schedule.after, resume.start or 0)
    extended_at = [change.step for change in resume.extended]
    return [hook.extended(extended_at) if isinstance(hook, EarlyStop) else hook for hook in hooks]


def _draw_pictures(
    setup: TrainSetup, run_dir: RunDir | None, measures: Measures
) -> Pictures | None:
    """Return the hook that draws pictures, where the experiment has them."""
    make = setup.experiment.pictures
    if run_dir is None or make is None:
        return None

    def draw(state: TrainState) -> Mapping[str, Any]:
        with measures.pause("drawing"):
            weights_and_key = setup.gather_weights(state)
            drawn = make(*weights_and_key) if run_dir.first else {}
            barrier()
            return drawn

    every = setup.config.log.pictures or setup.config.steps
    return Pictures(run_dir.pictures, every=every, draw=draw)


def _best_evaluation(
    config: RunConfig, evaluations: Mapping[str, EvaluateEvery]
) -> EvaluateEvery | None:
    """Return the evaluation whose best is retained; None if none is."""
    goal = BestMetric.parse(config.checkpoint.best)
    if goal is None or not evaluations:
        return None
    name, _, _ = goal.name.rpartition("/")
    return evaluations.get(name) or next(iter(evaluations.values()))
