"""Rehearsals of a run: a few steps of everything that it does, and overfitting of a few batches."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.inspect import num_bytes
from jtrain.config.dump import plain_values
from jtrain.config.top import RUNS
from jtrain.core.batches import Batches
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch
from jtrain.distributed.cluster import detect
from jtrain.errors import CheckpointError, ConfigError
from jtrain.inspect.debug.replay import take_calls
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import format_bytes, format_number
from jtrain.train.call_schedule import CallBatches
from jtrain.train.compile_step import (
    check_batches,
    resolve_with_step_time,
    trace_set_batches,
    trace_train_batch,
)
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved, resolve
from jtrain.train.runtime import enable_compilation_cache

CALLS = 4  # calls of the step: half before the state is saved, half after
BATCHES = 2  # batches of each evaluation set


@contextlib.contextmanager
def temporary_directory(name: str, purpose: str) -> Iterator[Path]:
    """Yield a new directory beside the runs, where an experiment is found; delete it at the end."""
    existed = RUNS.is_dir()
    try:
        RUNS.mkdir(exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{name}-{purpose}-", dir=RUNS))
    except OSError as error:
        raise ConfigError(
            f"{RUNS}: cannot be written ({error.strerror}). {disk_advice(error, RUNS).words}."
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # another process uses it
                RUNS.rmdir()


class FirstBatches:
    """The first batches of a set, over and over."""

    def __init__(self, batches: Batches, count: int):
        self._batches, self._count = batches, count
        self.size, self.ragged = batches.size, batches.ragged

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int, /) -> Batch:
        return self._batches[step % self._count]

    def shard(self, index: int, count: int) -> "FirstBatches":
        """Return the same batches, reading only the rows of one process."""
        return FirstBatches(self._batches.shard(index, count), self._count)


def dry_run(config: RunConfig, *, log: Callable[[str], None]) -> None:
    """Do a little of everything that a run does.

    The dry run reads, compiles, trains, evaluates, saves, restores, resumes to the same bits as
    without the interruption, and samples. It uses a temporary directory beside the run's, which is
    deleted at the end.

    Raises:
        UserError: the error that would have stopped the run.
    """
    enable_compilation_cache()
    cluster = detect(os.environ)
    if cluster.processes > 1:
        raise ConfigError(
            f"--fast rehearses a run in one process, and this command has {cluster.processes} "
            f"({cluster.variables}). Run it in one process; jtrain launch rehearses several."
        )
    with _stage("builds", log) as details:
        program = Program(_shorten(resolve(config)))
        calls = program.schedule  # the steps of a short run may be fewer than those needed here
        each = calls.steps(0)
        batches = program.batches(dataclasses.replace(calls, stop=max(CALLS * each, calls.stop)))
        count = num_elements(program.resolved.abstract_state.params)
        details.append(f"{count:,} parameters, {config.parallel.kind}")
    with _stage("reads", log) as details:
        details.append(_shapes(batches.read(0)))
    with _stage("compiles", log) as details:
        program.check_evaluation()
        take, state = program.compile_step(batches.schedule), program.initial_state()
        check_batches(
            program,
            [*trace_train_batch(program, batches.train, 0), *trace_set_batches(program)],
            state,
        )
        details.append("the step" if each == 1 else f"{each} steps in a call")
    with _stage("trains", log) as details:
        half = CALLS // 2 * each
        state, losses = _train(program, batches, take, state, 0, half)
        details.append(
            f"{half} steps, loss {format_number(losses[0])} -> {format_number(losses[-1])}"
        )
    for name in program.resolved.sets:
        with _stage("evaluates", log) as details:
            numbers = program.measure(state, name)
            measured = {k: v for k, v in numbers.items() if k != "rows"}
            values = ", ".join(f"{key} {format_number(value)}" for key, value in measured.items())
            details.append(f"{name}: {values} ({numbers['rows']} rows)")
    with (
        temporary_directory(config.name, "fast") as directory,
        CheckpointManager(directory / "checkpoints") as checkpoints,
    ):
        with _stage("saves", log) as details:
            checkpoints.save(half, state, {"config": plain_values(config)})
            checkpoints.wait()
            details.append(format_bytes(num_bytes(directory)))
        with _stage("restores", log) as details:
            restored = checkpoints.restore(half, program.resolved.abstract_state)
            _check_same(state, restored, "a restored state")
            details.append("the same bits")
        with _stage("resumes", log) as details:
            uninterrupted, _ = _train(program, batches, take, state, half, 2 * half)
            resumed, losses = _train(program, batches, take, restored, half, 2 * half)
            _check_same(uninterrupted, resumed, "a resumed run")
            last = format_number(losses[-1])
            details.append(f"steps {half + 1} to {2 * half} to the same bits, loss {last}")
    sample = program.resolved.experiment.sample
    if sample is not None:
        with _stage("samples", log) as details:
            text = sample(program.evaluation_params(resumed), resumed.extra, resumed.step_key())
            details.append(f"{len(text)} characters")


@contextlib.contextmanager
def _stage(name: str, log: Callable[[str], None]) -> Iterator[list[str]]:
    """Log a stage and its time when it completes or fails; the block appends its details."""
    details, start = [], time.perf_counter()
    try:
        yield details
    except BaseException:
        log(f"{name:10} failed after {time.perf_counter() - start:.2f} s:")
        raise
    log(f"{name:10} {' '.join(details):56} {time.perf_counter() - start:7.2f} s")


def _shorten(resolved: Resolved) -> Resolved:
    """Return the run with evaluation on the first batches only."""
    sets = {name: FirstBatches(x, min(len(x), BATCHES)) for name, x in resolved.sets.items()}
    experiment = dataclasses.replace(resolved.experiment, valid=sets or None)
    return dataclasses.replace(resolved, experiment=experiment)


def _train(
    program: Program, batches: CallBatches, take: StepFn, state: TrainState, start: int, stop: int
) -> tuple[TrainState, list[float]]:
    """Take some steps; return the state after them, and their losses."""
    losses: list[float] = []
    for call in take_calls(program, batches, state, start, stop, take):
        state = call.state
        losses += call.numbers("loss")
    return state, losses


def _check_same(first: TrainState, second: TrainState, what: str) -> None:
    """Raise CheckpointError with the leaf if two states differ in a bit."""
    others = named_leaves(jax.device_get(second))
    for name, leaf in named_leaves(jax.device_get(first)).items():
        if np.asarray(leaf).tobytes() != np.asarray(others[name]).tobytes():
            raise CheckpointError(
                f"{what} differs from the uninterrupted one in {name}. Something outside of the "
                f"state changes the result of a step: look for randomness that is not drawn from "
                f"rng, and for data that differs when a batch is read again."
            )


def _shapes(batch: Batch) -> str:
    arrays = [f"{n} {x.dtype}{list(x.shape)}" for n, x in batch.items() if n not in {"row", "mask"}]
    return ", ".join(arrays)


SMALL, DOWN = 0.05, 0.3  # of the first loss: what is left of it, and by how much it falls
_SLOW_CAUSES = """\
  - too few steps: raise steps=... or optimizer.lr
  - the loss has a floor: label smoothing, a KL or z-loss term, noise in the targets
  - new random draws at each step: dropout or augmentation; set it to 0
  - weight decay, or a schedule whose warmup or decay takes most of these steps"""
_FAILURE_CAUSES = """\
  - optimizer.lr: try a tenth and ten times; a warmup that never ends
  - inputs and labels that do not match: shuffled separately, shifted by one
  - the sign of the loss, or logits confused with probabilities
  - inputs far from 0 .. 1: scale them; or all equal: inspect a batch"""


@dataclasses.dataclass(frozen=True)
class OverfitResult:
    """The result of overfitting."""

    batches: int
    steps: int
    first: float
    """Mean loss over the first round of the batches."""
    last: float
    """Mean loss over the last round."""
    skipped: int
    """Number of skipped nonfinite steps."""
    unchanged: tuple[str, ...]
    """Parameters that no step changed."""

    @property
    def small(self) -> bool:
        """True if the loss fell to 5 % of the first loss."""
        return self.first > 0 and self.last <= SMALL * self.first

    @property
    def down(self) -> bool:
        """True if the loss fell by at least 30 %."""
        return self.last < self.first - DOWN * abs(self.first)

    def describe(self) -> str:
        """Return the result as text, with likely causes of a failure."""
        plural = "batch" if self.batches == 1 else "batches"
        losses = f"{format_number(self.first)} -> {format_number(self.last)}"
        line = f"{self.batches} {plural}, {self.steps} steps: loss {losses}"
        if self.small:
            return f"{line}. It memorizes them: model, loss and optimizer can learn."
        if self.down:
            return f"{line}. It decreases, but is not small. Possible causes:\n{_SLOW_CAUSES}"
        return "\n".join([f"{line}. It does not decrease. Common causes:", *self._failure_causes()])

    def _failure_causes(self) -> list[str]:
        notes = []
        if self.skipped:
            notes.append(
                f"  ! {self.skipped} of {self.steps} steps were not finite and skipped: --find-nan"
            )
        if self.unchanged:
            some = ", ".join(self.unchanged[:5])
            notes.append(
                f"  ! no step changed {some}: a stop_gradient, a mask, a learning rate of 0"
            )
        return [*notes, _FAILURE_CAUSES]


def overfit(config: RunConfig, batches: int, *, log: Callable[[str], None]) -> OverfitResult:
    """Train on the first `batches` batches for the steps of the config.

    Training stops as soon as the loss is 5 % of the first loss. Nothing is written.

    Args:
        log: called with a line every `log.every` steps.

    Raises:
        ConfigError: if there is no batch to train on, or fewer steps than batches.
    """
    enable_compilation_cache()
    resolved = resolve_with_step_time(dataclasses.replace(config, steps_per_call=1))
    config = resolved.config  # with durations in steps
    if not 1 <= batches <= config.steps // 2:
        raise ConfigError(
            f"--overfit {batches}: the config has {config.steps} steps, and each batch is used at "
            f"least twice. Write --overfit 1 .. {max(1, config.steps // 2)}, or set "
            f"steps={max(2, 100 * batches)}."
        )
    repeated = FirstBatches(resolved.experiment.train, batches)
    experiment = dataclasses.replace(resolved.experiment, train=repeated)
    own = dataclasses.replace(resolved, experiment=experiment, starts=None, stages=())
    program = Program(own)
    state = program.initial_state()
    before = jax.device_get(_checksums(state.params))
    losses: list[float] = []
    for call in take_calls(program, program.batches(), state, 0, config.steps):
        state = call.state
        losses += call.numbers("loss")
        if call.end % config.log.every == 0:
            log(f"step {call.end}  loss {format_number(losses[-1])}")
        first, last = np.mean(losses[:batches]), np.mean(losses[-batches:])
        if call.end % batches == 0 and first > 0 and last <= SMALL * first:
            break
    after = jax.device_get(_checksums(state.params))
    end = len(losses) // batches * batches
    return OverfitResult(
        batches=batches,
        steps=len(losses),
        first=float(np.mean(losses[:batches])),
        last=float(np.mean(losses[end - batches : end])),
        skipped=int(state.skipped),
        unchanged=tuple(n for n, sums in after.items() if np.array_equal(sums, before[n])),
    )


def _checksums(params: Any) -> dict[str, jax.Array]:
    """Return sums for each leaf that change with almost any change of the leaf."""
    sums = lambda leaf: jax.numpy.stack([leaf.sum(), abs(leaf).sum(), (leaf * leaf).sum()])
    return {name: sums(leaf) for name, leaf in named_leaves(params).items()}
