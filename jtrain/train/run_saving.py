"""Hooks that save the state of a run."""

import dataclasses
from collections.abc import Mapping, Sequence

from jtrain.checkpoint import SaveRetries
from jtrain.config.durations import Duration
from jtrain.core.loop import Hook
from jtrain.core.state import TrainState
from jtrain.train.hooks.checkpointing import PrepareSaves, RetrySave, SaveBest, SaveEvery
from jtrain.train.hooks.evaluation import EvaluateEvery, Results
from jtrain.train.hooks.leaf_log import LeafLog
from jtrain.train.hooks.signals import GraceBudget, GracePeriod
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_checks import Checks
from jtrain.train.run_measures import Measures, log_cadence
from jtrain.train.run_store import MemoryStore, RunStore
from jtrain.train.save_state import CheckpointSaver
from jtrain.train.setup import TrainSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving:
    """Hooks that save the state."""

    every: SaveEvery
    retries: SaveRetries | None
    hooks: Sequence[Hook]

    def settle(self, step: int, state: TrainState) -> None:
        """Wait until pending saves are on the disk; save `state` where one could not be written."""
        while self.retries is not None and self.retries.settle():
            self.every.again(step, state)


def save(
    resume: ResumePoint,
    store: RunStore,
    measures: Measures,
    checks: Checks,
    leaf_log: LeafLog | None,
    results: Mapping[str, Results],
    best: EvaluateEvery | None,
    budget: GraceBudget,
) -> Saving:
    """Return the hooks that save the state: at a cadence, at a best evaluation, after a failure.

    A run in memory keeps the weights of the best evaluation, and nothing else.
    """
    setup = resume.setup
    if isinstance(store, MemoryStore):
        every = SaveEvery(every=setup.config.steps, save=store.holder(setup, best))
        return Saving(every=every, retries=None, hooks=[SaveBest(best, every)] if best else [])
    # Files whose rows are on the disk before a checkpoint is; not the timings.
    written = [measures.metrics, checks.record, leaf_log, checks.policy.events]
    retries = SaveRetries(store.checkpoints, measures.lines.print)
    saver = CheckpointSaver(
        setup,
        store.run_dir,
        retries,
        policy=checks.policy,
        extended=resume.extended,
        results=results,
        best=best,
        files=[rows for each in written if (rows := getattr(each, "rows", None))],
        record=checks.record,
        recompute=checks.recompute,
        pause=measures.pause,
        budget=budget,
        copy=store.copy,
    )
    cadence = setup.config.checkpoint.every
    if isinstance(cadence, Duration):  # in time
        every = SaveEvery(every=1, save=saver, seconds=cadence.seconds)
    else:
        every = SaveEvery(every=cadence or setup.config.steps, save=saver)
    bests = [SaveBest(best, every)] if best else []
    prepare = PrepareSaves(store.checkpoints.prepare)
    hooks = [*bests, prepare, every, RetrySave(retries.is_due, every)]
    return Saving(every=every, retries=retries, hooks=hooks)


def watch_grace_period(setup: TrainSetup, measures: Measures, budget: GraceBudget) -> GracePeriod:
    """Return the hook that compares the time of a step and a save with the grace period."""
    config, most = setup.config, setup.schedule.most
    cadence, budget.in_flight = config.checkpoint.every, setup.schedule.in_flight

    def seconds_per_call() -> float | None:
        pace = measures.speed.pace
        return None if pace is None else most * pace.seconds_per_step

    return GracePeriod(
        budget,
        every=log_cadence(config),
        call=seconds_per_call,
        cadence=str(cadence)
        if isinstance(cadence, Duration)
        else f"{cadence or config.steps} steps",
        log=measures.lines.print,
    )
