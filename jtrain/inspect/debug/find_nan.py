"""Finds where the first value that is not finite came from: operation, line, leaf and rows."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import CheckpointManager
from jtrain.core.pytree import name, named_leaves
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.inspect.debug.nonfinite_origin import NonfiniteInput, NonfiniteOp, NonfiniteTrace
from jtrain.inspect.debug.single_device_step import (
    alone,
    on_one_device,
    slope_of,
    weights_of,
    whole_batch,
)
from jtrain.inspect.debug.source import SourceLine, written
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.metrics import read
from jtrain.train.longer_run import keep_lengths, lengths
from jtrain.train.rollback import apply_decisions
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import paced

ROWS = 4096  # looked at alone, at most


@dataclasses.dataclass(frozen=True)
class NonfiniteOrigin:
    """Something that made or held a value which is not finite."""

    what: str
    """`log(0.0) = -inf`, or ``row 3 of `x` is nan``."""
    detail: str = ""
    lines: Sequence[SourceLine] = ()
    primitive: str = ""
    """Empty for what was not finite to begin with."""
    leaf: str = ""
    """The parameter, or the array of the batch, that was not finite to begin with."""


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """Where a step that is not finite comes from."""

    step: int
    loss: float
    grad_norm: float
    origins: Sequence[NonfiniteOrigin]
    """The earliest first: two where an infinity made a NaN."""
    leaf: str
    """The parameter whose gradient was the first that is not finite; empty if all are finite."""
    leaves: int
    """Parameters whose gradient is not finite, of `of_leaves`."""
    of_leaves: int
    rows: Sequence[int]
    """Rows of the batch that make it so alone."""
    of_rows: int
    why_no_rows: str = ""

    def told(self) -> str:
        """What a person reads."""
        spoiled = f"the loss is {self.loss:g}"
        if np.isfinite(self.loss):
            spoiled = f"the loss is {self.loss:g}, its gradient is not"
        told = [f"step {self.step} is not finite: {spoiled}"]
        for place, origin in enumerate(self.origins):
            told.append(f"  {'first' if place == 0 else 'then':6} {origin.what}")
            told += [f"         {origin.detail}"] if origin.detail else []
            told += [f"         {line}" for line in reversed(origin.lines)]
        if not self.origins:
            told.append(
                "  Run one operation at a time the step is finite: it is not when the compiler has "
                "joined operations. Lower optimizer.lr, or take precision.kind=f32."
            )
        if self.leaf:
            count = f"{self.leaves} of {self.of_leaves} gradients are not finite"
            told.append(f"  leaf   {self.leaf}: {count}, this one was the first")
        told.append(f"  rows   {self._rows()}")
        return "\n".join(told)

    def _rows(self) -> str:
        if self.why_no_rows:
            return self.why_no_rows
        if not self.rows:
            return f"each of the {self.of_rows} is finite alone: it is their sum that is not"
        if len(self.rows) == self.of_rows:
            return f"all {self.of_rows}, each of them alone: it is no matter of the data"
        some = ", ".join(map(str, self.rows[:10])) + (", ..." if len(self.rows) > 10 else "")
        return f"{some} of 0 .. {self.of_rows - 1}: those alone are not finite, the others are"


def find_nan(
    config: RunConfig, *, source: Path | None = None, tell: Callable[[str], None]
) -> NonfiniteReport | None:
    """Where the first step that is not finite comes from; None if all steps are finite.

    Goes on from the newest checkpoint of the run before it, or begins at the first step; the run's
    directory is read and not written.

    Args:
        tell: takes a line about what is being done.

    Raises:
        ConfigError: if the directory holds a run of other values, or in several processes.
    """
    keep_compiled_programs()
    on_one_device(config)  # refuses several processes
    config = dataclasses.replace(config, steps_per_call=1)
    directory = RunDir(Path("runs") / (config.name or config.experiment))
    config = keep_lengths(config, directory.stored(type(config)))
    advice = f"Look into that one: jtrain run {directory.config} --find-nan"
    advice += f"\nor into a new one: name={config.name}-2"
    directory.refuse_another(config, advice, also=lengths(config))
    config = apply_decisions(config, directory)
    parts = paced(config, directory.pace)
    state = _before(parts, directory, tell)
    spoiled = _first_bad(parts, state, tell)
    if spoiled is None:
        return None
    step, state = spoiled
    tell(f"step {step} is not finite; running it again, one operation at a time")
    single = alone(config)
    return look(single, jax.device_put(jax.device_get(state), _device(single)), step)


def look(parts: TrainSetup, state: TrainState, step: int) -> NonfiniteReport:
    """Where step `step`, the first being 1, is not finite from the state before it."""
    batch, slope = whole_batch(parts, step), slope_of(parts)
    state = dataclasses.replace(state, step=jnp.int32(step - 1))
    given = {"parameter": state.params, "extra": state.extra, "batch": batch}

    def computed(given: Any) -> Any:
        known = dataclasses.replace(state, params=given["parameter"], extra=given["extra"])
        found = slope(known, given["batch"], None)
        return found.loss, found.grads, found.grad_norm

    flat, structure = jax.tree.flatten(given)
    program = jax.make_jaxpr(lambda *leaves: computed(jax.tree.unflatten(structure, leaves)))(*flat)
    blame = NonfiniteTrace(program, flat)
    loss, *grads, norm = blame.outputs
    names = [_kind_and_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(given)]
    broken = [i for i, grad in enumerate(grads) if blame.broken(grad)]
    first = min(broken, key=lambda i: grads[i].number, default=None)
    start = loss if blame.broken(loss) else grads[first] if first is not None else norm
    origins = blame.origins(start) if blame.broken(start) else []
    rows, why = _rows_alone(parts, state, batch)
    leaves = list(named_leaves(state.params))
    return NonfiniteReport(
        step=step,
        loss=float(loss.array),
        grad_norm=float(norm.array),
        origins=[_told(origin, names) for origin in origins],
        leaf="" if first is None else leaves[first],
        leaves=len(broken),
        of_leaves=len(leaves),
        rows=rows,
        of_rows=len(batch["row"]),
        why_no_rows=why,
    )


def _before(parts: TrainSetup, directory: RunDir, tell: Callable[[str], None]) -> TrainState:
    """The newest state of the run before the last step that was skipped, as far as is known."""
    known = max((row.get("skipped", 0) for row in read(directory.metrics)), default=0)
    with CheckpointManager(directory.checkpoints, owner=directory.owner()) as checkpoints:
        for step in sorted(checkpoints.steps(), reverse=True):
            state = checkpoints.restore(step, parts.like)
            known = max(known, int(state.skipped))
            if known == 0 or int(state.skipped) < known:
                tell(f"from checkpoint {step} of {directory.path}")
                return state
    tell("from the first step")
    return parts.fresh()


def _first_bad(
    parts: TrainSetup, state: TrainState, tell: Callable[[str], None]
) -> tuple[int, TrainState] | None:
    """The first step whose loss or gradient is not finite, and the state before it."""
    step, skipped = parts.compile_step(), int(state.skipped)
    least = getattr(state.scale, "minimum", 0.0)
    begin = int(state.step)
    for number in range(begin + 1, parts.config.steps + 1):
        scale = float(getattr(state.scale, "factor", 0.0))
        state, _ = step(state, parts.place(parts.calls[number - 1]))
        if int(state.skipped) > skipped and scale <= least:
            return number, state  # it was skipped: all but its count is as it was before
        skipped = int(state.skipped)
        if number % parts.config.log.every == 0:
            tell(f"step {number}/{parts.config.steps} is finite")
    tell(f"every step from {begin + 1} to {parts.config.steps} is finite")
    return None


def _rows_alone(parts: TrainSetup, state: TrainState, batch: Batch) -> tuple[list[int], str]:
    """The rows that alone make loss or gradient not finite, or why there is no telling."""
    count = len(batch["row"])
    if parts.experiment.couples != "nothing":
        return [], "they meet in this loss, so none is looked at alone"
    if count > ROWS:
        return [], f"{count} are too many to look at each alone; take batch={ROWS} or less"
    weights, slope = weights_of(parts, state, batch), slope_of(parts)

    @jax.jit
    def finite(row: Batch) -> jax.Array:
        found = slope(state, row, weights)
        return jnp.isfinite(found.loss) & jnp.isfinite(found.grad_norm)

    one = lambda i: {name: array[i : i + 1] for name, array in batch.items()}
    return [i for i in range(count) if not finite(one(i))], ""


def _told(
    origin: NonfiniteOp | NonfiniteInput, names: Sequence[tuple[str, str]]
) -> NonfiniteOrigin:
    if isinstance(origin, NonfiniteOp):
        of = f" of {origin.dtype}{list(origin.shape)}, {origin.count} of {_size(origin)}"
        turn = "".join(f", turn {number} of a loop" for number in origin.turn)
        return NonfiniteOrigin(
            what=origin.what,
            detail=f"at {list(origin.place)}{of}{turn}" if origin.shape else turn.strip(", "),
            lines=written(origin.equation, origin.calls),
            primitive=origin.primitive,
        )
    kind, leaf = names[origin.index]
    row, *rest = [*origin.place, None]
    place = f" at {list(origin.place)}" if origin.place else ""
    if kind == "batch":
        within = [i for i in rest if i is not None]
        place = f" at {within}" if within else ""
        return NonfiniteOrigin(
            f"row {row} of `{leaf}` in the batch is {origin.value:g}{place}", leaf=leaf
        )
    held = {"parameter": "the parameter", "extra": "the leaf of `extra`"}[kind]
    return NonfiniteOrigin(
        f"{held} {leaf} is {origin.value:g}{place} before the step",
        f"{origin.count} of {_size(origin)} of its numbers are not finite",
        leaf=leaf,
    )


def _size(origin: NonfiniteOp | NonfiniteInput) -> int:
    return int(np.prod(origin.shape))


def _kind_and_name(path: tuple[Any, ...]) -> tuple[str, str]:
    return name(path[:1]), name(path[1:])


def _device(parts: TrainSetup) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, parts.like)
