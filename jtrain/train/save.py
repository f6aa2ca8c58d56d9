"""Saving of a run: the hook that saves its state, and the save itself."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import SaveRetries
from jtrain.config.dump import dump, to_plain
from jtrain.config.durations import Duration
from jtrain.config.lookup import FIT
from jtrain.core.loop import NEVER, FinishedSteps, Hook, Recorder
from jtrain.core.state import TrainState
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import check_equal, merge_shards
from jtrain.io.environment import jtrain_version
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel.custom_loop import gather
from jtrain.train.fit_data import TREE, describe_tree
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.hooks.evaluation import EvaluateEvery
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.run_dir import IDENTITY
from jtrain.train.run_hooks import Attempt, Pause
from jtrain.train.run_store import DirectoryStore, MemoryStore


class SaveHook(Hook, Recorder):
    """Hook that saves the state: at its cadence, at a best evaluation, again after a failed save.

    It is the last of the hooks, because a resumed run does not repeat what other hooks did at the
    step of a checkpoint. An error of `save` ends the run, rather than train for hours without a
    checkpoint.

    Args:
        every: steps, or a time, after which the state is saved.
        save: takes a step and its state, and returns when the state may be donated; False if the
            state is not one to save.
        best: the evaluation whose best is saved.
        saved: step of the checkpoint that the run resumes from; None: a new run.
        retries: of `save`; None if no save can fail.
        prepare: loads what a save needs in the background, once a step is done.
        clock: gives seconds.
    """

    def __init__(
        self,
        *,
        every: int | Duration,
        save: Callable[[int, TrainState], bool],
        best: EvaluateEvery | None = None,
        saved: int | None = None,
        retries: SaveRetries | None = None,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = every.seconds if isinstance(every, Duration) else 0.0
        self.every = every if isinstance(every, int) else NEVER
        self._save, self._best, self._retries, self._prepare = save, best, retries, prepare
        self._clock, self._last_save = clock, clock()
        self._began: tuple[int, float] | None = None  # the first step that was seen, and when
        self._fails = False
        self._saved = saved  # step of the last state that was given to `save`

    def on_steps(self, finished: FinishedSteps) -> None:
        """Prepare the first save, and look whether the last one has failed."""
        if self._began is None:
            self._prepare()
            self._began = finished.steps[0] - 1, self._clock()
        self._fails = self._retries is not None and self._retries.is_due()

    def next_state(self, step: int) -> int:
        """Return the next step at which a save may be due."""
        if self._fails:
            return step + 1
        best = self._best.next_state(step) if self._best else NEVER
        return min(super().next_state(step), best, self._next_by_clock(step))

    def on_state(self, step: int, state: TrainState) -> None:
        """Save the state if it is due."""
        is_best = self._best is not None and self._best.is_best(step)
        if self._fails:
            self.save_again(step, state)
        elif step % self.every == 0 or is_best or self._is_late():
            self.save_once(step, state)

    def save_once(self, step: int, state: TrainState) -> None:
        """Save a state, unless it was the last to be saved."""
        if step != self._saved:
            self.save_again(step, state)

    def save_again(self, step: int, state: TrainState) -> bool:
        """Save a state, even if it was the last to be saved; return what `save` returns."""
        is_good = self._save(step, state)
        self._saved, self._last_save, self._fails = step, self._clock(), False
        return is_good

    def wait(self, step: int, state: TrainState) -> None:
        """Wait until the last save is on the disk; save the last state while that fails.

        Raises:
            SaveError: if it fails too often.
        """
        while self._retries is not None and self._retries.last_save_failed():
            if not self.save_again(step, state):
                return

    def _is_late(self) -> bool:
        return bool(self._seconds) and self._clock() - self._last_save >= self._seconds

    def _next_by_clock(self, step: int) -> int:
        """Return the step by which half of the time to the next save will have passed."""
        if not self._seconds:
            return NEVER
        if self._began is None or step <= self._began[0] or self._is_late():
            return step + 1
        pace = (self._clock() - self._began[1]) / (step - self._began[0])
        left = self._seconds - (self._clock() - self._last_save)
        return step + max(1, int(left / max(pace, 1e-9) / 2))


def make_save_hook(
    attempt: Attempt,
    best: EvaluateEvery | None,
    make_saver: "Callable[[DirectoryStore, SaveRetries], CheckpointSaver]",
) -> SaveHook:
    """Return the hook that saves the state; in memory it holds that of the best evaluation.

    Args:
        make_saver: of a run in a directory.
    """
    store, config = attempt.store, attempt.config
    if isinstance(store, MemoryStore):
        return SaveHook(every=config.steps, save=store.holder(attempt.program, best), best=best)
    retries = SaveRetries(store.checkpoints)
    return SaveHook(
        every=config.checkpoint.every or config.steps,
        save=make_saver(store, retries),
        best=best,
        saved=attempt.resume.start,
        retries=retries,
        prepare=store.checkpoints.prepare,  # after the first step
    )


class CheckpointSaver:
    """Saver of states in a run's directory; it saves nothing after a bad step.

    Args:
        bad_steps: its state goes into the checkpoint.
        evaluations: by set; their results are recorded there too.
        files: rows that are flushed to the disk before the checkpoint is written.
        record: of the steps, whose file is among `files`.
        recompute: check that must agree before anything is saved.
        pause: context manager for work beside training.
    """

    def __init__(
        self,
        attempt: Attempt,
        store: DirectoryStore,
        retries: SaveRetries,
        *,
        bad_steps: BadSteps,
        evaluations: Mapping[str, EvaluateEvery],
        best: EvaluateEvery | None,
        files: Sequence[JsonlWriter],
        record: StepRecorder | None,
        recompute: RecomputeCheck,
        pause: Pause,
    ):
        self._budget, self._directory = attempt.signals.budget, store.run_dir
        if store.run_dir.first and self._budget.save is None:  # as an earlier start measured it
            self._budget.save = store.run_dir.facts().get("seconds_per_save")
        self._resolved, self._resume = attempt.program.resolved, attempt.resume
        self._retries, self._copy, self._began = retries, store.copy, 0.0
        self._bad_steps, self._evaluations, self._best = bad_steps, evaluations, best
        self._files, self._record, self._recompute = files, record, recompute
        self._pause = pause

    def __call__(self, step: int, state: TrainState) -> bool:
        """Save a state; return when it may be donated, False after a bad step.

        Raises:
            SaveError: if it could not be saved, nor those before it.
            DeviceError: if a device computes wrongly, as far as is known.
            PeerError: if the processes of the run differ.
        """
        self._bad_steps.judge_all()
        if self._bad_steps.bad:
            return False
        self._recompute.compare_all()
        self._began = time.monotonic()
        with self._pause("saving"):
            number = self._best.number(step) if self._best else None
            about = self._about(step, state)
            before = lambda: self._before(step, state, about)
            self._retries.save(step, state, about, number, self._sealed, before=before)
        return True

    def _before(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        for file in self._files:
            file.sync()
        if self._record:
            self._check_processes_equal(step, state, self._record.newest)

    def _about(self, step: int, state: TrainState) -> dict[str, Any]:
        resolved, resume = self._resolved, self._resume
        extended = [change._asdict() for change in resume.extended]
        found = {name: each.results.get(step, {}) for name, each in self._evaluations.items()}
        tree = {"params": state.params, "extra": state.extra}
        return {
            "config": to_plain(resolved.config),
            "jtrain": jtrain_version(),
            "jax": jax.__version__,
            "data": resolved.data,
            "valid": {},
            "batches": merge_shards(resume.batches.train.state(step)),
            **({"extended": extended} if extended else {}),
            "without": [list(window) for window in resume.batches.train.windows],
            "guard": self._bad_steps.state(),
            **{name: _numbers(results) for name, results in found.items()},
            **({TREE: describe_tree(tree)} if resolved.config.experiment == FIT else {}),
            IDENTITY: self._directory.sealed(),
        }

    def _check_processes_equal(self, step: int, state: TrainState, batch: int) -> None:
        if jax.process_count() == 1:
            return
        index, count = self._resolved.strategy.part
        facts = {
            "the config": hashlib.sha256(dump(self._resolved.config).encode()).hexdigest()[:16],
            "the step": f"{int(state.step)}",
            "the key": " ".join(f"{x:08x}" for x in np.ravel(gather(state.seed)).tolist()),
            f"part {index + 1} of {count} of the last batch": f"{batch:016x}",
        }
        check_equal(facts, f"at step {step}")

    def _sealed(self, step: int) -> None:
        """Record the step in run.json: it names no step that a power cut would take."""
        HEARTBEAT.saved(step)
        seconds = self._budget.save = time.monotonic() - self._began
        self._budget.warn()
        self._directory.write_status("running", step=step, seconds_per_save=round(seconds, 3))
        if self._directory.first:
            self._copy(step)


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of an evaluation; arrays (a confusion matrix) are in metrics.jsonl."""
    return {name: x for name, x in results.items() if isinstance(x, int | float)}
