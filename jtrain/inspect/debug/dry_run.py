"""A rehearsal of a run: a few steps of everything that it will do, in a minute and not a night."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
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
from jtrain.inspect.debug.stages import Stage, Stages
from jtrain.io.formatting import number
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import RunConfig
from jtrain.train.first_batch.set_checks import check, look, look_at_sets
from jtrain.train.setup import TrainSetup, set_up

CALLS = 4  # of the step; half of them before the state is saved, half after
BATCHES = 2  # of each evaluation set


class FirstBatches:
    """The first batches of a data set that is gone through once."""

    def __init__(self, rows: Batches, count: int):
        self._rows, self._count = rows, count
        self.size, self.ragged = rows.size, rows.ragged

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int, /) -> Batch:
        return self._rows[step]

    def shard(self, index: int, count: int) -> "FirstBatches":
        """The same batches, of which only the rows of one process are read."""
        return FirstBatches(self._rows.shard(index, count), self._count)


def fast(config: RunConfig, *, tell: Callable[[str], None]) -> list[Stage]:
    """Everything that a run does, a little of it: what was done, and how long each part took.

    Reads, compiles, trains, evaluates, saves, restores, goes on from what was restored to the same
    bits as without the interruption, and samples. Nothing of it stays: it happens in a directory of
    its own beside the run's, which is deleted at the end.

    Args:
        tell: takes a line for each part when it is done.

    Raises:
        UserError: what would have stopped the run.
    """
    keep_compiled_programs()
    stages, each = Stages(tell), config.steps_per_call
    cluster = detect(os.environ)
    if cluster.processes > 1:
        raise ConfigError(
            f"--fast rehearses a run in one process, and here are {cluster.processes} "
            f"({cluster.spelt}). Type it in one: jtrain launch rehearses several."
        )
    with stages.stage("builds") as stage:
        parts = _shortened(set_up(config))
        stage.said = f"{num_elements(parts.like.params):,} parameters, {config.parallel.kind}"
    with stages.stage("reads") as stage:
        batch = parts.calls[0]
        stage.said = _shapes(batch)
    with stages.stage("compiles") as stage:
        parts.check_evaluation()
        step, state = parts.compile_step(), parts.fresh()
        check(parts, [*look(parts, 0), *look_at_sets(parts)], state)
        stage.said = "the step" if each == 1 else f"{each} steps in a call"
    with stages.stage("trains") as stage:
        half = CALLS // 2 * each
        ended, losses = _train(parts, step, state, 0, half)
        stage.said = f"{half} steps, loss {number(losses[0])} -> {number(losses[-1])}"
    state = ended.state
    for name in parts.sets:
        with stages.stage("evaluates") as stage:
            numbers = parts.measure(state, name)
            measured = {k: v for k, v in numbers.items() if k != "rows"}
            told = ", ".join(f"{key} {number(value)}" for key, value in measured.items())
            stage.said = f"{name}: {told} ({numbers['rows']} rows)"
    with _beside(config) as place, CheckpointManager(place / "checkpoints") as checkpoints:
        with stages.stage("saves") as stage:
            checkpoints.save(half, state, {"config": plain_values(config)})
            checkpoints.wait()
            stage.said = f"{_bytes(place) / 1e6:,.2f} MB"
        with stages.stage("restores") as stage:
            restored = checkpoints.restore(half, parts.like)
            _check_same(state, restored, "a state that was saved and restored")
            stage.said = "the same bits"
        with stages.stage("resumes") as stage:
            on, _ = _train(parts, step, state, half, 2 * half)
            resumed, losses = _train(parts, step, restored, half, 2 * half)
            _check_same(on.state, resumed.state, "a run that was resumed")
            last = number(losses[-1])
            stage.said = f"steps {half + 1} to {2 * half} to the same bits, loss {last}"
    sample = parts.experiment.sample
    if sample is not None:
        with stages.stage("samples") as stage:
            end = resumed.state
            text = sample(parts.evaluation_params(end), end.extra, end.step_key())
            stage.said = f"{len(text)} characters"
    return stages.done


def _shortened(parts: TrainSetup) -> TrainSetup:
    """The same, evaluated on the first batches alone."""
    short = lambda rows: FirstBatches(rows, min(len(rows), BATCHES))
    valid: Any = parts.experiment.valid
    if isinstance(valid, Mapping):
        valid = {name: short(rows) for name, rows in valid.items()}
    elif valid is not None:
        valid = short(valid)
    return dataclasses.replace(parts, experiment=dataclasses.replace(parts.experiment, valid=valid))


def _train(
    parts: TrainSetup, step: StepFn, state: TrainState, start: int, stop: int
) -> tuple[LoopResult[TrainState], list[float]]:
    """The end of some steps of a run, and the loss of each call."""
    each, losses = parts.config.steps_per_call, []

    def noted(state: TrainState, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        return state, metrics

    read = lambda call: parts.place(parts.calls[call])
    with ReadAhead(read, start=start // each, stop=stop // each) as feed:
        ended = train_loop(noted, state, feed, start=start, stop=stop, steps_per_call=each)
    return ended, [float(np.ravel(loss.value())[-1]) for loss in losses]


def _check_same(first: TrainState, second: TrainState, what: str) -> None:
    """Raises CheckpointError, with the leaf, if two states differ in a bit."""
    others = named_leaves(jax.device_get(second))
    for name, leaf in named_leaves(jax.device_get(first)).items():
        if np.asarray(leaf).tobytes() != np.asarray(others[name]).tobytes():
            raise CheckpointError(
                f"{what} differs from one that was not, in {name}. Something outside of the state "
                f"changes what a step computes: look for randomness that is not drawn from rng, "
                f"and for data that is not the same when a batch is read again."
            )


@contextlib.contextmanager
def _beside(config: RunConfig) -> Iterator[Path]:
    """A new directory on the disk of the runs, which is gone afterwards."""
    runs = Path("runs")
    there = runs.is_dir()
    try:
        runs.mkdir(0o700, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{config.name}-fast-", dir=runs))
    except OSError as error:
        raise ConfigError(
            f"{runs}: cannot be written ({error.strerror}), and the run's directory lies in it. "
            f"Make room, or run where you may write."
        ) from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if not there:
            with contextlib.suppress(OSError):  # somebody else began to use it
                runs.rmdir()


def _shapes(batch: Batch) -> str:
    arrays = [f"{n} {x.dtype}{list(x.shape)}" for n, x in batch.items() if n not in {"row", "mask"}]
    return ", ".join(arrays)


def _bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
