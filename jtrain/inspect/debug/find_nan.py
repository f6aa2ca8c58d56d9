"""The origin of the first nonfinite value of a run: operation, line, leaf and rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.top import RUNS
from jtrain.core.pytree import name, named_leaves
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.inspect.debug.nonfinite import NonfiniteOrigin, NonfiniteTrace
from jtrain.inspect.debug.replay import restore_before, take_calls
from jtrain.inspect.debug.single_device import (
    make_gradient,
    move_state,
    read_full_batch,
    set_up_single_device,
    term_weights,
    to_single_device,
)
from jtrain.io.jsonl import read_rows
from jtrain.train.compile_step import resolve_with_step_time
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program
from jtrain.train.resume import match_config
from jtrain.train.rollback import apply_decisions
from jtrain.train.run_dir import RunDir
from jtrain.train.runtime import enable_compilation_cache

ROWS = 4096  # the largest batch whose rows are checked one by one


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """A nonfinite step with its origins."""

    step: int
    loss: float
    grad_norm: float
    origins: Sequence[NonfiniteOrigin]
    """Origins, earliest first: two if an infinity became a NaN."""
    leaf: str
    """Parameter with the first nonfinite gradient; empty if all gradients are finite."""
    leaves: int
    """Number of parameters with a nonfinite gradient, of `of_leaves`."""
    of_leaves: int
    rows: Sequence[int]
    """Rows of the batch that are nonfinite by themselves."""
    of_rows: int
    why_no_rows: str = ""

    def describe(self) -> str:
        """Return the report as text."""
        problem = f"the loss is {self.loss:g}"
        if np.isfinite(self.loss):
            problem = f"the loss is {self.loss:g}, its gradient is not"
        lines = [f"step {self.step} is not finite: {problem}"]
        for index, origin in enumerate(self.origins):
            lines.append(f"  {'first' if index == 0 else 'then':6} {origin.what}")
            lines += [f"         {origin.detail}"] if origin.detail else []
            lines += [f"         {line}" for line in reversed(origin.lines)]
        if not self.origins:
            lines.append(
                "  The step is finite when operations run one by one, and not finite when the "
                "compiler fuses them. Lower optimizer.lr, or set precision.kind=f32."
            )
        if self.leaf:
            count = f"{self.leaves} of {self.of_leaves} gradients are not finite"
            lines.append(f"  leaf   {self.leaf}: {count}, this one was the first")
        lines.append(f"  rows   {self._rows()}")
        return "\n".join(lines)

    def _rows(self) -> str:
        if self.why_no_rows:
            return self.why_no_rows
        if not self.rows:
            return f"each of the {self.of_rows} is finite by itself; their sum is not"
        if len(self.rows) == self.of_rows:
            return f"all {self.of_rows}, each by itself: the data is not the cause"
        some = ", ".join(map(str, self.rows[:10])) + (", ..." if len(self.rows) > 10 else "")
        return f"{some} of 0 .. {self.of_rows - 1} are not finite by themselves, the others are"


def find_nan(config: RunConfig, *, log: Callable[[str], None]) -> NonfiniteReport | None:
    """Find the origin of the first nonfinite step; return None if all steps are finite.

    Training resumes from the run's newest checkpoint before that step, or starts at the first step.
    The run's directory is read and not written.

    Raises:
        ConfigError: if the directory has a run with other values, or in several processes.
    """
    enable_compilation_cache()
    to_single_device(config)  # raises in several processes
    config = dataclasses.replace(config, steps_per_call=1)
    run_dir = RunDir(RUNS / config.run_name)
    advice = f"To debug the existing run: jtrain run {run_dir.config} --find-nan"
    advice += f"\nto debug a new one: name={config.name}-2"
    config = apply_decisions(match_config(run_dir, config, advice).config, run_dir)
    program = Program(resolve_with_step_time(config, run_dir.pace))
    first_nonfinite = _first_nonfinite(program, *_before(program, run_dir, log), log)
    if first_nonfinite is None:
        return None
    step, state = first_nonfinite
    log(f"step {step} is not finite; running it again, one operation at a time")
    single = set_up_single_device(config)
    return explain_nonfinite_step(single, move_state(state, single), step)


def explain_nonfinite_step(program: Program, state: TrainState, step: int) -> NonfiniteReport:
    """Return the origins of the nonfinite step `step`, counted from 1."""
    batch, program = read_full_batch(program, step), program.at(step - 1)
    gradient_of = make_gradient(program)
    state = dataclasses.replace(state, step=jnp.int32(step - 1))
    given = {"parameter": state.params, "extra": state.extra, "batch": batch}

    def computed(given: Any) -> Any:
        inputs = dataclasses.replace(state, params=given["parameter"], extra=given["extra"])
        found = gradient_of(inputs, given["batch"], None)
        return found.loss, found.grads, found.grad_norm

    flat, structure = jax.tree.flatten(given)
    jaxpr = jax.make_jaxpr(lambda *leaves: computed(jax.tree.unflatten(structure, leaves)))(*flat)
    trace = NonfiniteTrace(jaxpr, flat)
    loss, *grads, norm = trace.outputs
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(given)]
    names = [(name(path[:1]), name(path[1:])) for path in paths]
    nonfinite_grads = [i for i, grad in enumerate(grads) if trace.broken(grad)]
    first = min(nonfinite_grads, key=lambda i: grads[i].number, default=None)
    start = loss if trace.broken(loss) else grads[first] if first is not None else norm
    origins = trace.origins(start) if trace.broken(start) else []
    rows, why = _nonfinite_rows(program, state, batch)
    leaves = list(named_leaves(state.params))
    return NonfiniteReport(
        step=step,
        loss=float(loss.array),
        grad_norm=float(norm.array),
        origins=[_name_input(origin, names) for origin in origins],
        leaf="" if first is None else leaves[first],
        leaves=len(nonfinite_grads),
        of_leaves=len(leaves),
        rows=rows,
        of_rows=len(batch["row"]),
        why_no_rows=why,
    )


def _before(
    program: Program, run_dir: RunDir, log: Callable[[str], None]
) -> tuple[int, TrainState]:
    """Return the newest saved step before the last known skipped one, and its state."""
    counts = [row.get("skipped", 0) for row in read_rows(run_dir.metrics)]

    def none_skipped_after(state: TrainState) -> bool:
        counts.append(int(state.skipped))
        return not max(counts) or counts[-1] < max(counts)

    steps, batches = program.resolved.config.steps, program.batches()
    return restore_before(program, batches, run_dir, steps, log, none_skipped_after)


def _first_nonfinite(
    program: Program, start: int, state: TrainState, log: Callable[[str], None]
) -> tuple[int, TrainState] | None:
    """Return the first nonfinite step and the state before it; None if all steps are finite."""
    config, least = program.resolved.config, getattr(state.scale, "minimum", 0.0)
    skipped, scale = int(state.skipped), float(getattr(state.scale, "factor", 0.0))
    for call in take_calls(program, program.batches(), state, start, config.steps):
        state = call.state
        if int(state.skipped) > skipped and scale <= least:
            return call.end, state  # a skipped step changes only the count
        skipped, scale = int(state.skipped), float(getattr(state.scale, "factor", 0.0))
        if call.end % config.log.every == 0:
            log(f"step {call.end}/{config.steps} is finite")
    log(f"every step from {start + 1} to {config.steps} is finite")
    return None


def _nonfinite_rows(program: Program, state: TrainState, batch: Batch) -> tuple[list[int], str]:
    """Return the rows that are nonfinite by themselves, or the reason for not checking them."""
    count = len(batch["row"])
    if program.resolved.experiment.rows_interact != "never":
        return [], "rows interact in this loss, so none is checked by itself"
    if count > ROWS:
        return [], f"{count} are too many to check one by one; set batch={ROWS} or less"
    weights, gradient_of = term_weights(program, state, batch), make_gradient(program)

    @jax.jit
    def finite(row: Batch) -> jax.Array:
        found = gradient_of(state, row, weights)
        return jnp.isfinite(found.loss) & jnp.isfinite(found.grad_norm)

    row_of = lambda i: {name: array[i : i + 1] for name, array in batch.items()}
    return [i for i in range(count) if not finite(row_of(i))], ""


def _name_input(origin: NonfiniteOrigin, names: Sequence[tuple[str, str]]) -> NonfiniteOrigin:
    """Return the origin with the name of the input in words, if it is one."""
    if origin.equation is not None:
        return origin
    kind, leaf = names[origin.index]
    place = list(origin.place[1:] if kind == "batch" else origin.place)
    at = f" at {place}" if place else ""
    owner = {"parameter": "the parameter", "extra": "the leaf of `extra`"}.get(kind)
    what = f"{owner} {leaf} {origin.what}{at} before the step"
    if kind == "batch":
        what = f"row {origin.place[0]} of `{leaf}` in the batch {origin.what}{at}"
    return dataclasses.replace(origin, what=what, leaf=leaf)
