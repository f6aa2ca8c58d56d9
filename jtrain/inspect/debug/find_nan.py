"""The origin of the first nonfinite value of a run: operation, line, leaf and rows."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import CheckpointManager
from jtrain.config.top import RUNS
from jtrain.core.pytree import name, named_leaves
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.inspect.debug.eval_jaxpr import Equation, ExecutedOp, TracedValue, execute
from jtrain.inspect.debug.single_device import (
    make_gradient,
    read_full_batch,
    set_up_single_device,
    term_weights,
    to_single_device,
)
from jtrain.inspect.debug.source import SourceLine, find_source
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.log import read_metrics
from jtrain.train.program import Program
from jtrain.train.resume import match_config
from jtrain.train.rollback import apply_decisions
from jtrain.train.run_dir import RunDir
from jtrain.train.runtime import enable_compilation_cache
from jtrain.train.step_time import resolve_with_step_time

ROWS = 4096  # the largest batch whose rows are checked one by one


@dataclasses.dataclass(frozen=True)
class NonfiniteOrigin:
    """An operation that made an infinity from finite inputs, or a NaN from inputs without NaN.

    Or an input of the program that is not finite: it has no `equation`.
    """

    what: str
    """`log(0.0) = -inf`, or ``row 3 of `x` is nan``."""
    place: tuple[int, ...]
    """Index of the first nonfinite element."""
    count: int
    """Number of nonfinite elements."""
    shape: tuple[int, ...]
    dtype: str
    equation: Equation | None = None
    turn: tuple[int, ...] = ()
    """Turn of each loop around the operation, from 0."""
    calls: tuple[Equation, ...] = ()
    """Calls and loops around the operation."""
    index: int = -1
    """Position of the input."""
    leaf: str = ""
    """Parameter or array of the batch that is the input; else empty."""

    @property
    def primitive(self) -> str:
        """Name of the primitive; empty for an input."""
        return self.equation.primitive.name if self.equation is not None else ""

    @property
    def lines(self) -> list[SourceLine]:
        """Source lines of the operation."""
        return find_source(self.equation, self.calls) if self.equation is not None else []

    @property
    def detail(self) -> str:
        """Place and extent of the nonfinite elements."""
        extent = f"{self.count} of {math.prod(self.shape)}"
        if self.equation is None:
            return f"{extent} of its numbers are not finite"
        turn = "".join(f", turn {number} of a loop" for number in self.turn)
        where = f"at {list(self.place)} of {self.dtype}{list(self.shape)}, {extent}"
        return f"{where}{turn}" if self.shape else turn.strip(", ")


class _Broken(NamedTuple):
    """The record of a nonfinite value."""

    nan: bool
    parents: Sequence[int]  # numbers of the nonfinite values that it was computed from
    origin: NonfiniteOrigin | None


class NonfiniteTrace:
    """The execution of a program, with the origin of each nonfinite value."""

    def __init__(self, program: Any, inputs: Sequence[Any]):
        self._broken: dict[int, _Broken] = {}
        self._inputs = inputs
        for number, array in enumerate(inputs):
            if (values := _nonfinite_values(array)) is not None:
                self._broken[number] = _Broken(bool(np.isnan(values).any()), (), None)
        self.outputs = execute(program, inputs, self._record)

    def broken(self, value: TracedValue) -> bool:
        """Return whether an output of the program is not finite."""
        return value.number in self._broken or _nonfinite_values(value.array) is not None

    def origins(self, value: TracedValue) -> list[NonfiniteOrigin]:
        """Return the origins of a nonfinite value, earliest first.

        An infinity that became a NaN has two origins: that of the infinity, and that of the NaN.
        """
        found: list[NonfiniteOrigin] = []
        number, nan = value.number, self._nan(value.number)
        while number in self._broken:
            broken = self._broken[number]
            causes = [n for n in broken.parents if self._nan(n) or not nan]
            if not causes and broken.origin is not None:
                found.append(broken.origin)
                causes, nan = list(broken.parents), False  # continue with the infinity
            if not causes:
                if number < len(self._inputs):
                    values = np.asarray(self._inputs[number])
                    extent = _extent(values)
                    what = f"is {float(values[extent['place']]):g}"
                    found.append(NonfiniteOrigin(what, **extent, index=number))
                break
            number = min(causes)
        return found[::-1]

    def _nan(self, number: int) -> bool:
        return number in self._broken and self._broken[number].nan

    def _record(self, executed: ExecutedOp) -> None:
        for output in executed.outputs:
            values = _nonfinite_values(output.array)
            if values is None:
                continue
            parents = [
                v.number for v in _source_inputs(executed, values) if v.number in self._broken
            ]
            nan = bool(np.isnan(values).any())
            created = not any(self._nan(n) or not nan for n in parents)
            origin = None
            if created:
                extent = _extent(values)
                what = _describe_operation(executed, extent["place"], values[extent["place"]])
                equation, turn, calls = executed.equation, executed.turn, executed.calls
                origin = NonfiniteOrigin(what, **extent, equation=equation, turn=turn, calls=calls)
            self._broken[output.number] = _Broken(nan, parents, origin)


def _nonfinite_values(x: Any) -> np.ndarray | None:
    """Return `x` as a numpy array if an element is NaN or infinite; else None."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return None
    host = np.asarray(x)
    return None if np.isfinite(host).all() else host


def _source_inputs(executed: ExecutedOp, values: np.ndarray) -> Sequence[TracedValue]:
    """Return the inputs that the nonfinite elements were computed from."""
    if executed.equation.primitive.name != "select_n":
        return executed.inputs
    chosen = np.broadcast_to(np.asarray(executed.inputs[0].array), values.shape)
    return [executed.inputs[1 + int(i)] for i in np.unique(chosen[~np.isfinite(values)])]


def _describe_operation(executed: ExecutedOp, place: tuple[int, ...], value: Any) -> str:
    """Return an operation with its inputs at a place, or their ranges: `log(0.0) = -inf`."""
    arrays = [np.asarray(v.array) for v in executed.inputs if not _is_key(v.array)]
    if all(x.shape in {(), executed.outputs[0].array.shape} for x in arrays):
        arguments = [_format(x[place] if x.shape else x) for x in arrays]
    else:
        arguments = [_format_range(x) for x in arrays]
    return f"{executed.equation.primitive.name}({', '.join(arguments)}) = {_format(value)}"


def _extent(values: np.ndarray) -> dict[str, Any]:
    """Return place, count, shape and dtype of the NaNs, or of the infinities if there is none."""
    nonfinite = np.isnan(values) if np.isnan(values).any() else ~np.isfinite(values)
    return {
        "place": tuple(np.argwhere(nonfinite)[0].tolist()),
        "count": int(nonfinite.sum()),
        "shape": values.shape,
        "dtype": str(values.dtype),
    }


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _format(x: Any) -> str:
    return f"{float(x):.6g}" if jnp.issubdtype(x.dtype, jnp.floating) else str(x)


def _format_range(x: np.ndarray) -> str:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        return f"{x.dtype}{list(x.shape)}"
    finite = x[np.isfinite(x)].astype(np.float64)
    low_high = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else "none finite"
    return f"{x.dtype}{list(x.shape)} of {low_high}"


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

    Args:
        log: called with a line about progress.

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
    state = _before(program, run_dir, log)
    first_nonfinite = _first_nonfinite(program, state, log)
    if first_nonfinite is None:
        return None
    step, state = first_nonfinite
    log(f"step {step} is not finite; running it again, one operation at a time")
    single = set_up_single_device(config)
    shardings = jax.tree.map(lambda x: x.sharding, single.resolved.like)
    return explain_nonfinite_step(single, jax.device_put(jax.device_get(state), shardings), step)


def explain_nonfinite_step(program: Program, state: TrainState, step: int) -> NonfiniteReport:
    """Return the origins of the nonfinite step `step`, counted from 1."""
    batch, gradient_of = read_full_batch(program, step), make_gradient(program)
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


def _before(program: Program, run_dir: RunDir, log: Callable[[str], None]) -> TrainState:
    """Return the newest state of the run before its last known skipped step."""
    known = max((row.get("skipped", 0) for row in read_metrics(run_dir.metrics)), default=0)
    with CheckpointManager(run_dir.checkpoints, owner=run_dir.owner()) as checkpoints:
        for step in sorted(checkpoints.steps(), reverse=True):
            state = checkpoints.restore(step, program.resolved.like)
            known = max(known, int(state.skipped))
            if known == 0 or int(state.skipped) < known:
                log(f"from checkpoint {step} of {run_dir.path}")
                return state
    log("from the first step")
    return program.initial_state()


def _first_nonfinite(
    program: Program, state: TrainState, log: Callable[[str], None]
) -> tuple[int, TrainState] | None:
    """Return the first nonfinite step and the state before it; None if all steps are finite."""
    step, skipped = program.compile_step(), int(state.skipped)
    least = getattr(state.scale, "minimum", 0.0)
    begin = int(state.step)
    for number in range(begin + 1, program.resolved.config.steps + 1):
        scale = float(getattr(state.scale, "factor", 0.0))
        state, _ = step(state, program.place(program.batches().stacked[number - 1]))
        if int(state.skipped) > skipped and scale <= least:
            return number, state  # a skipped step changes only the count
        skipped = int(state.skipped)
        if number % program.resolved.config.log.every == 0:
            log(f"step {number}/{program.resolved.config.steps} is finite")
    log(f"every step from {begin + 1} to {program.resolved.config.steps} is finite")
    return None


def _nonfinite_rows(program: Program, state: TrainState, batch: Batch) -> tuple[list[int], str]:
    """Return the rows that are nonfinite by themselves, or the reason for not checking them."""
    count = len(batch["row"])
    if program.resolved.experiment.couples != "nothing":
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
