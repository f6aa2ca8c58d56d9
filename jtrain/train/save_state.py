"""Saving a state of a run: flush its files, compare processes, write the checkpoint."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import SaveRetries
from jtrain.config.dump import dump, to_plain
from jtrain.core.state import TrainState
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import check_equal, merge_shards
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel.custom_loop import gather
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.hooks.evaluation import EvaluateEvery
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.longer_run import LengthChange
from jtrain.train.run_dir import RunDir
from jtrain.train.run_record import IDENTITY
from jtrain.train.setup import TrainSetup


class CheckpointSaver:
    """Saver of states in a run's directory; it saves nothing after a bad step.

    Args:
        guarded: what goes with a state about bad steps.
        extended: the changes of the run's length, which go with it too.
        evaluations: by set; their results go with it.
        best: the evaluation whose best is kept.
        files: gives those whose rows are on the disk before it is.
        record: the steps that were taken, likewise.
        twice: has to agree first.
        pause: what is done beside training is done within.
        copy: copies a step that is on the disk to where else it is to be.
    """

    def __init__(
        self,
        setup: TrainSetup,
        directory: RunDir,
        retries: SaveRetries,
        *,
        guarded: BadStepPolicy,
        extended: Sequence[LengthChange],
        evaluations: Mapping[str, EvaluateEvery],
        best: Callable[[], EvaluateEvery | None],
        files: Callable[[], Sequence[JsonlWriter]],
        record: StepRecorder | None,
        twice: RecomputeCheck | None,
        pause: Callable[[str], AbstractContextManager[None]],
        copy: Callable[[int], None] = lambda step: None,
    ):
        stands = directory.facts() if directory.first else {}
        self.seconds: float | None = stands.get("seconds_per_save")
        """Seconds of the last save, until it was on the disk; None: not measured."""
        self._setup, self._directory, self._retries = setup, directory, retries
        self._guarded, self._evaluations, self._best = guarded, evaluations, best
        self._extended = [change._asdict() for change in extended]
        self._files, self._record, self._twice = files, record, twice
        self._pause, self._began, self._copy = pause, 0.0, copy

    def __call__(self, step: int, state: TrainState) -> None:
        """Save a state; return when it may be donated.

        Raises:
            SaveError: if it could not be saved, nor those before it.
            DeviceError: if a device computes wrongly, as far as is known.
            PeerError: if the processes of the run have come apart.
        """
        if self._guarded.bad:
            return
        if self._twice:
            self._twice.settle()
        self._began = time.monotonic()
        with self._pause("saving"):
            best = self._best()
            number = best.number(step) if best else None
            about = self._about(step)
            before = lambda: self._before(step, state, about)
            self._retries.save(step, state, about, number, self._sealed, before=before)

    def _before(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        """Flush all numbers up to a step to the disk, and compare the processes of the run.

        The checkpoint records the sizes of the files, so that a resumed run finds what is missing.
        """
        if self._record:
            self._record.sync()
        for file in self._files():
            file.sync()
        about["rows"] = {file.path.name: file.mark() for file in self._files()}
        if self._record:
            self._refuse_apart(step, state, self._record.newest)

    def _about(self, step: int) -> dict[str, Any]:
        """Return the record that a checkpoint carries."""
        found = {name: each.results.get(step, {}) for name, each in self._evaluations.items()}
        return {
            "config": to_plain(self._setup.config),
            "jtrain": version("jtrain"),
            "jax": jax.__version__,
            "data": self._setup.data,
            "valid": {},
            "batches": merge_shards(self._setup.calls.state(step)),
            **({"extended": self._extended} if self._extended else {}),
            **self._guarded.about(step),
            **{name: _numbers(results) for name, results in found.items()},
            IDENTITY: self._directory.sealed(),
        }

    def _refuse_apart(self, step: int, state: TrainState, batch: int) -> None:
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
        self.seconds = time.monotonic() - self._began
        self._directory.write_status("running", step=step, seconds_per_save=round(self.seconds, 3))
        if self._directory.first:
            self._copy(step)


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of an evaluation; arrays (a confusion matrix) are in metrics.jsonl."""
    return {name: x for name, x in results.items() if isinstance(x, int | float)}
