"""Dry runs: a few steps of everything that a run will do."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import CheckpointManager
from jtrain.config.dump import plain_values
from jtrain.core.batches import Batches
from jtrain.core.loop import LoopResult, train_loop
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.distributed.cluster import detect
from jtrain.errors import CheckpointError, ConfigError
from jtrain.io.formatting import format_number
from jtrain.train.compilation_cache import enable_compilation_cache
from jtrain.train.experiment import RunConfig
from jtrain.train.first_batch.set_checks import check_batches, trace_set_batches, trace_train_batch
from jtrain.train.hooks.function_hooks import on_numbers
from jtrain.train.setup import TrainSetup, set_up
from jtrain.train.temporary_run import temporary_directory


@dataclasses.dataclass
class Stage:
    """A completed stage."""

    name: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:10} {self.detail:56} {self.seconds:7.2f} s"


class Stages:
    """Consecutive stages, each logged when it completes or fails."""

    def __init__(self, log: Callable[[str], None]):
        self.done: list[Stage] = []
        self._log = log

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a block; the block may set `detail`."""
        stage, start = Stage(name), time.perf_counter()
        try:
            yield stage
        except BaseException:
            self._log(f"{name:10} failed after {time.perf_counter() - start:.2f} s:")
            raise
        stage.seconds = time.perf_counter() - start
        self.done.append(stage)
        self._log(str(stage))


CALLS = 4  # calls of the step: half before the state is saved, half after
BATCHES = 2  # batches of each evaluation set


class FirstBatches:
    """The first batches of an evaluation set."""

    def __init__(self, rows: Batches, count: int):
        self._rows, self._count = rows, count
        self.size, self.ragged = rows.size, rows.ragged

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int, /) -> Batch:
        return self._rows[step]

    def shard(self, index: int, count: int) -> "FirstBatches":
        """Return the same batches, reading only the rows of one process."""
        return FirstBatches(self._rows.shard(index, count), self._count)


def dry_run(config: RunConfig, *, log: Callable[[str], None]) -> list[Stage]:
    """Do a little of everything that a run does; return the stages and their times.

    The dry run reads, compiles, trains, evaluates, saves, restores, resumes to the same bits as
    without the interruption, and samples. It uses a temporary directory beside the run's, which is
    deleted at the end.

    Args:
        log: called with a line for each completed stage.

    Raises:
        UserError: the error that would have stopped the run.
    """
    enable_compilation_cache()
    stages = Stages(log)
    cluster = detect(os.environ)
    if cluster.processes > 1:
        raise ConfigError(
            f"--fast rehearses a run in one process, and this command has {cluster.processes} "
            f"({cluster.variables}). Run it in one process; jtrain launch rehearses several."
        )
    with stages.stage("builds") as stage:
        setup = _shorten(set_up(config))
        stage.detail = f"{num_elements(setup.like.params):,} parameters, {config.parallel.kind}"
    with stages.stage("reads") as stage:
        batch, each = setup.read_call(0), setup.schedule.steps(0)
        stage.detail = _shapes(batch)
    with stages.stage("compiles") as stage:
        setup.check_evaluation()
        step, state = setup.compile_step(), setup.fresh()
        check_batches(setup, [*trace_train_batch(setup, 0), *trace_set_batches(setup)], state)
        stage.detail = "the step" if each == 1 else f"{each} steps in a call"
    with stages.stage("trains") as stage:
        half = CALLS // 2 * each
        result, losses = _train(setup, step, state, 0, half)
        stage.detail = (
            f"{half} steps, loss {format_number(losses[0])} -> {format_number(losses[-1])}"
        )
    state = result.state
    for name in setup.sets:
        with stages.stage("evaluates") as stage:
            numbers = setup.measure(state, name)
            measured = {k: v for k, v in numbers.items() if k != "rows"}
            values = ", ".join(f"{key} {format_number(value)}" for key, value in measured.items())
            stage.detail = f"{name}: {values} ({numbers['rows']} rows)"
    with (
        temporary_directory(config.name, "fast") as directory,
        CheckpointManager(directory / "checkpoints") as checkpoints,
    ):
        with stages.stage("saves") as stage:
            checkpoints.save(half, state, {"config": plain_values(config)})
            checkpoints.wait()
            stage.detail = f"{_bytes(directory) / 1e6:,.2f} MB"
        with stages.stage("restores") as stage:
            restored = checkpoints.restore(half, setup.like)
            _check_same(state, restored, "a restored state")
            stage.detail = "the same bits"
        with stages.stage("resumes") as stage:
            uninterrupted, _ = _train(setup, step, state, half, 2 * half)
            resumed, losses = _train(setup, step, restored, half, 2 * half)
            _check_same(uninterrupted.state, resumed.state, "a resumed run")
            last = format_number(losses[-1])
            stage.detail = f"steps {half + 1} to {2 * half} to the same bits, loss {last}"
    sample = setup.experiment.sample
    if sample is not None:
        with stages.stage("samples") as stage:
            end = resumed.state
            text = sample(setup.evaluation_params(end), end.extra, end.step_key())
            stage.detail = f"{len(text)} characters"
    return stages.done


def _shorten(setup: TrainSetup) -> TrainSetup:
    """Return the setup with evaluation on the first batches only, and as many steps as it takes."""
    first = lambda rows: FirstBatches(rows, min(len(rows), BATCHES))
    valid: Any = setup.experiment.valid
    if isinstance(valid, Mapping):
        valid = {name: first(rows) for name, rows in valid.items()}
    elif valid is not None:
        valid = first(valid)
    setup = dataclasses.replace(
        setup, experiment=dataclasses.replace(setup.experiment, valid=valid)
    )
    calls = setup.schedule  # the steps of a short run may be fewer than those of the dry run
    stop = max(CALLS * calls.steps(0), calls.stop)
    return setup.with_schedule(dataclasses.replace(calls, stop=stop))


def _train(
    setup: TrainSetup, step: StepFn, state: TrainState, start: int, stop: int
) -> tuple[LoopResult[TrainState], list[float]]:
    """Train some steps; return the result and their losses."""
    losses: list[float] = []
    record = on_numbers(lambda step, numbers: losses.append(float(numbers["loss"])), every=1)
    read = lambda step: setup.place(setup.read_call(step))
    after, size = setup.schedule.after, setup.steps_per_call
    with ReadAhead(read, start=start, stop=stop, after=after) as feed:
        result = train_loop(
            step, state, feed, start=start, stop=stop, hooks=[record], steps_per_call=size
        )
    return result, losses


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


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
