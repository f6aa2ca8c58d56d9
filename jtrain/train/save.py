"""Saving of a run: hooks that save its state, and the save itself."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import SaveRetries
from jtrain.config.dump import dump, to_plain
from jtrain.config.durations import Duration
from jtrain.config.lookup import FIT
from jtrain.core.loop import Hook
from jtrain.core.state import TrainState
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import check_equal, merge_shards
from jtrain.io.environment import jtrain_version
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel.custom_loop import gather
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.fit_data import TREE, describe_tree
from jtrain.train.hooks.checkpointing import PrepareSaves, RetrySave, SaveBest, SaveEvery
from jtrain.train.hooks.evaluation import EvaluateEvery, Results
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.signals import GraceBudget, GracePeriod
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.leaf_statistics import LeafLog
from jtrain.train.longer_run import LengthChange
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_checks import Checks
from jtrain.train.run_dir import IDENTITY, RunDir
from jtrain.train.run_measures import Measures, log_cadence
from jtrain.train.run_store import MemoryStore, RunStore
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


class CheckpointSaver:
    """Saver of states in a run's directory; it saves nothing after a bad step.

    Args:
        policy: for bad steps; its record goes into the checkpoint.
        extended: changes of the run's length, recorded there too.
        results: of the evaluations, by set, recorded there too.
        best: the evaluation whose best is retained.
        files: rows that are flushed to the disk before the checkpoint is written.
        record: of the steps, flushed likewise.
        recompute: check that must agree before anything is saved.
        pause: context manager for work beside training.
        budget: takes the seconds of a save.
        copy: called with each step that is on the disk, to copy it elsewhere.
    """

    def __init__(
        self,
        setup: TrainSetup,
        directory: RunDir,
        retries: SaveRetries,
        *,
        policy: BadStepPolicy,
        extended: Sequence[LengthChange],
        results: Mapping[str, Results],
        best: EvaluateEvery | None,
        files: Sequence[JsonlWriter],
        record: StepRecorder | None,
        recompute: RecomputeCheck | None,
        pause: Callable[[str], AbstractContextManager[None]],
        budget: GraceBudget,
        copy: Callable[[int], None] = lambda step: None,
    ):
        if directory.first and budget.save is None:  # as an earlier start of the run measured it
            budget.save = directory.facts().get("seconds_per_save")
        self._setup, self._directory, self._retries = setup, directory, retries
        self._policy, self._results, self._best = policy, results, best
        self._extended = [change._asdict() for change in extended]
        self._files, self._record, self._recompute = files, record, recompute
        self._pause, self._began, self._budget, self._copy = pause, 0.0, budget, copy

    def __call__(self, step: int, state: TrainState) -> None:
        """Save a state; return when it may be donated.

        Raises:
            SaveError: if it could not be saved, nor those before it.
            DeviceError: if a device computes wrongly, as far as is known.
            PeerError: if the processes of the run differ.
        """
        if self._policy.bad:
            return
        if self._recompute:
            self._recompute.settle()
        self._began = time.monotonic()
        with self._pause("saving"):
            number = self._best.number(step) if self._best else None
            about = self._about(step, state)
            before = lambda: self._before(step, state, about)
            self._retries.save(step, state, about, number, self._sealed, before=before)

    def _before(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        """Flush all numbers up to a step to the disk, and compare the processes of the run."""
        if self._record:
            self._record.sync()
        for file in self._files:
            file.sync()
        if self._record:
            self._check_processes_equal(step, state, self._record.newest)

    def _about(self, step: int, state: TrainState) -> dict[str, Any]:
        """Return the record that a checkpoint carries."""
        found = {name: results.get(step, {}) for name, results in self._results.items()}
        tree = {"params": state.params, "extra": state.extra}
        return {
            "config": to_plain(self._setup.config),
            "jtrain": jtrain_version(),
            "jax": jax.__version__,
            "data": self._setup.data,
            "valid": {},
            "batches": merge_shards(self._setup.calls.state(step)),
            **({"extended": self._extended} if self._extended else {}),
            **self._policy.about(step),
            **{name: _numbers(results) for name, results in found.items()},
            **({TREE: describe_tree(tree)} if self._setup.config.experiment == FIT else {}),
            IDENTITY: self._directory.sealed(),
        }

    def _check_processes_equal(self, step: int, state: TrainState, batch: int) -> None:
        """Check that all processes have the same config, step, key and batch."""
        if jax.process_count() == 1:
            return
        index, count = self._setup.strategy.part
        facts = {
            "the config": hashlib.sha256(dump(self._setup.config).encode()).hexdigest()[:16],
            "the step": f"{int(state.step)}",
            "the key": " ".join(f"{x:08x}" for x in np.ravel(gather(state.seed)).tolist()),
            f"part {index + 1} of {count} of the last batch": f"{batch:016x}",
        }
        check_equal(facts, f"at step {step}")

    def _sealed(self, step: int) -> None:
        """Record the step in run.json: it names no step that a power cut would take."""
        HEARTBEAT.saved(step)
        seconds = self._budget.save = time.monotonic() - self._began
        self._directory.write_status("running", step=step, seconds_per_save=round(seconds, 3))
        if self._directory.first:
            self._copy(step)


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of an evaluation; arrays (a confusion matrix) are in metrics.jsonl."""
    return {name: x for name, x in results.items() if isinstance(x, int | float)}
