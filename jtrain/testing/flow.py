"""Row flow: operations that combine values of different rows, from the trace of a loss alone.

A loss is traced for two numbers of rows. A dim whose size differs between the traces is a dim of
rows. For every value the walk collects what was done to the rows that it was computed from.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.interpret import (
    PROGRAMS,
    DifferentProgramsError,
    Equation,
    Interpreter,
    pair_equations,
    place_of,
)
from jtrain.core.loss import named_means
from jtrain.inspect.debug.source import find_source
from jtrain.testing.case import LossCase
from jtrain.testing.float64 import COUNTING
from jtrain.testing.splits import NUMBERS_OF_A_ROW

# Operations that rank the elements along a dim.
RANKS = {"sort", "top_k", "approx_top_k", "argmax", "argmin", "cumsum", "cummax", "cummin"}
# Operations that move rows.
MOVES = {"rev", "gather", "dynamic_slice", "slice", "concatenate", "pad", "dynamic_update_slice"}
# Sums, and operations on a sum whose result is a sum.
SUMS = {"reduce_sum", "dot_general", "slice", "gather", "dynamic_slice", "squeeze"}
LINEAR = {
    *("add", "sub", "neg", "add_any", "convert_element_type", "reshape", "broadcast_in_dim"),
    *("transpose", "copy", "copy_p", "stop_gradient", "optimization_barrier", "concatenate", "pad"),
    *("reduce_precision", "select_n", "sharding_constraint", "split"),
}
PRODUCTS = {"mul", "dot_general", "div"}
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne"}
FLAGS = {*COMPARISONS, "and", "or", "not", "is_finite", "reduce_and", "reduce_or"}
KEEPS = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "slice", "transpose"}
DECISIONS = {*COMPARISONS, "max", "min", "clamp", "sign", "floor", "ceil", "round"}


class RowCoupling(NamedTuple):
    """An operation that combines values of different rows."""

    operation: str
    line: str = ""
    """`losses.py:12`; empty if unknown."""
    contents: bool = True
    """True if the values were computed from more of a row than `row` and `mask`."""
    dtype: str = ""

    @property
    def description(self) -> str:
        """The operation and its line, for messages."""
        return f"{self.operation} over rows{f' at {self.line}' if self.line else ''}"


Facts = Mapping[str, RowCoupling]


class RowFlow(NamedTuple):
    """Facts about the rows that a value was computed from.

    The kinds of facts, each with the first operation of its kind:

    - `reduced`: the value contains a sum, or another reduction, over rows.
    - `meets`: a reduced value was broadcast back to rows.
    - `paired`: each row was combined with each other row.
    - `ranked`: rows were ranked against each other.
    - `moved`: rows were moved to other positions.
    - `function`: the value is a nonlinear function of a reduced value.
    - `branch`: a reduced value decided a branch.
    - `narrow`: rows were reduced in a 16-bit float.
    - `whole`: rows were summed in integers that are more than flags.
    - `mixed`: random draws decided where rows were moved.
    """

    contents: bool = False
    """True if the value was computed from more of a row than `row` and `mask`."""
    drawn: bool = False
    """True if the value was computed from the key."""
    flag: bool = False
    """True if the value is 0 or 1."""
    facts: Facts = MappingProxyType({})


class _FlowWalk(Interpreter[RowFlow]):
    """A walk over a program, each of its equations beside that of a trace for fewer rows."""

    enters = PROGRAMS - {"shard_map", "custom_partitioning"}

    def __init__(self, large: Any, small: Any):
        pairs = pair_equations(large, small)
        self._small = {place_of(calls, one): other for calls, one, other in pairs}

    def constant(self, value: Any, aval: Any) -> RowFlow:
        return RowFlow()

    def join(self, *values: RowFlow) -> RowFlow:
        contents, drawn = any(x.contents for x in values), any(x.drawn for x in values)
        facts: Facts = {}
        for kind, coupling in [each for flow in values for each in flow.facts.items()]:
            facts = _add_fact(facts, kind, coupling)
        return RowFlow(contents, drawn, all(x.flag for x in values), facts)

    def choose(self, decision: RowFlow, *values: RowFlow) -> RowFlow:
        """Return the flow of a value that a branch on another value has selected."""
        facts, both = self.join(*values).facts, self.join(decision, *values)
        sums = [decision.facts[kind] for kind in ("branch", "reduced") if kind in decision.facts]
        if sums:
            coupling = self._coupling(self.calls[-1], any(x.contents for x in sums))
            facts = _add_fact(
                facts, "branch", coupling._replace(line=coupling.line or sums[0].line)
            )
        return RowFlow(both.contents, both.drawn, facts=facts)

    def operation(self, equation: Equation, inputs: list[RowFlow]) -> list[RowFlow]:
        name, other = equation.primitive.name, self._small[place_of(self.calls, equation)]
        into = find_row_dims(equation.invars, other.invars)
        out = find_row_dims(equation.outvars, other.outvars)
        contents, drawn, _, facts = self.join(*inputs)
        coupling = self._coupling(equation, contents)
        sums = [i for i, flow in enumerate(inputs) if "reduced" in flow.facts and not into[i]]
        if name in RANKS and _ranks_rows(equation, into):
            facts = _add_fact(facts, "ranked", coupling)
        if sum(map(bool, into)) > 1 and any(len(dims) > 1 for dims in out):
            facts = _add_fact(facts, "paired", coupling)
        if name in MOVES and any(into) and any(out) and _moves_rows(equation, other, into):
            facts = _add_fact(facts, "moved", coupling)
            if any(flow.drawn for flow in inputs[1:]):
                facts = _add_fact(facts, "mixed", coupling)
        if name == "select_n" and inputs[0].drawn and "moved" in facts:
            facts = _add_fact(facts, "mixed", facts["moved"])
        if any(into) and not any(out):  # rows are reduced
            facts = _add_fact(facts, "reduced", coupling)
            facts = facts if name in SUMS else _add_fact(facts, "function", coupling)
            facts = _add_fact(facts, "narrow", coupling) if _is_narrow(equation) else facts
            if _may_overflow(equation, inputs):
                facts = _add_fact(facts, "whole", coupling)
        elif sums and any(out):  # a reduced value is broadcast to rows
            facts = _add_fact(
                facts, "meets", self.join(*(inputs[i] for i in sums)).facts["reduced"]
            )
        elif sums:
            deciding = sums[:1] if name == "select_n" else sums
            decided_by = any(inputs[i].contents for i in deciding)
            facts = _reduced_facts(equation, facts, sums, coupling, decided_by=decided_by)
        flag = name in FLAGS or (name in KEEPS and all(flow.flag for flow in inputs))
        return [RowFlow(contents, drawn, flag, facts) for _ in equation.outvars]

    def scan(
        self, equation: Equation, turn: Any, carry: list[RowFlow], rows: list[RowFlow]
    ) -> Sequence[RowFlow]:
        other, count = self._small[place_of(self.calls[:-1], equation)], len(carry)
        if equation.params["length"] == other.params["length"]:
            return super().scan(equation, turn, carry, rows)
        coupling, reduced = self._coupling(equation), []
        for i, flow in enumerate(carry):  # a sum over rows
            facts = _add_fact(flow.facts, "reduced", coupling)
            if _is_narrow(equation, i):
                dtype = str(equation.outvars[i].aval.dtype)
                facts = _add_fact(facts, "narrow", coupling._replace(dtype=dtype))
            reduced.append(RowFlow(True, flow.drawn, False, facts))
        outputs = list(super().scan(equation, turn, reduced, rows))
        for i in range(count, len(outputs)):  # the stacked states go back to their rows
            if reduced := outputs[i].facts.get("reduced"):
                facts = _add_fact(outputs[i].facts, "meets", reduced)
                outputs[i] = outputs[i]._replace(facts=facts)
        return outputs

    def _coupling(self, equation: Equation, contents: bool = True) -> RowCoupling:
        around = [call for call in self.calls if call is not equation]
        dtype = str(getattr(equation.outvars[0].aval, "dtype", ""))
        return RowCoupling(equation.primitive.name, _find_line(equation, around), contents, dtype)


def _find_line(equation: Equation, calls: Sequence[Equation]) -> str:
    """Return the innermost line of the loss, `losses.py:12`; empty if unknown."""
    lines = find_source(equation, calls)[-1:]
    for call in reversed(calls):
        if lines and not lines[-1].in_jtrain:
            break
        lines = [line for line in find_source(call) if not line.in_jtrain][-1:] or lines
    return f"{Path(lines[0].file).name}:{lines[0].line}" if lines else ""


def _reduced_facts(
    one: Any, facts: Facts, sums: Sequence[int], coupling: RowCoupling, *, decided_by: bool
) -> Facts:
    name = one.primitive.name
    decides = name in DECISIONS or (name == "select_n" and 0 in sums)
    if decides:
        facts = _add_fact(facts, "branch", coupling._replace(contents=decided_by))
    if name in COMPARISONS:  # the result is a decision, not a sum
        return {kind: coupling for kind, coupling in facts.items() if kind != "reduced"}
    product = name in PRODUCTS and (len(sums) > 1 or (name == "div" and 1 in sums))
    if product or (name not in LINEAR | SUMS | PRODUCTS and not decides):
        facts = _add_fact(facts, "function", coupling)
    return _add_fact(facts, "narrow", coupling) if _is_narrow(one) else facts


def _add_fact(facts: Facts, kind: str, coupling: RowCoupling) -> Facts:
    """Add a fact; one about the contents of rows replaces one about their numbers or masks."""
    old = facts.get(kind)
    if old is None or (coupling.contents and not old.contents):
        return {**facts, kind: coupling}
    return facts


def _is_narrow(equation: Any, output: int = 0) -> bool:
    dtype = getattr(equation.outvars[output].aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _may_overflow(equation: Any, flows_in: Sequence[RowFlow]) -> bool:
    dtype = equation.outvars[0].aval.dtype
    if equation.primitive.name not in {"reduce_sum", "dot_general"} or dtype not in COUNTING:
        return False
    return dtype.itemsize < 4 or not all(flow.flag for flow in flows_in)


def _ranks_rows(equation: Any, into: Sequence[set[int]]) -> bool:
    params = equation.params
    if equation.primitive.name in {"top_k", "approx_top_k"}:
        along = {len(equation.invars[0].aval.shape) - 1}
    elif "axes" in params:
        along = set(params["axes"])
    else:
        along = {params.get("dimension", params.get("axis", 0))}
    return any(along & dims for dims in into)


def _moves_rows(one: Any, other: Any, into: Sequence[set[int]]) -> bool:
    name, params, dims = one.primitive.name, one.params, into[0]
    if name == "rev":
        return bool(dims & set(params["dimensions"]))
    if name == "concatenate":
        return any(params["dimension"] in dims for dims in into)
    if name == "gather":
        return bool(dims & set(params["dimension_numbers"].start_index_map))
    # Other operations move rows if they change the size of the dim.
    shapes = [(e.invars[0].aval.shape, e.outvars[0].aval.shape) for e in (one, other)]
    return any(i < len(b) and a[i] != b[i] for a, b in shapes for i in dims)


def find_row_dims(large: Sequence[Any], small: Sequence[Any]) -> list[set[int]]:
    """Return for each array the dims whose sizes differ between two traces: the dims of rows."""

    def dims(a: Any, b: Any) -> set[int]:
        shapes = zip(getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ()), strict=False)
        return {i for i, (x, y) in enumerate(shapes) if x != y}

    return [dims(a, b) for a, b in zip(large, small, strict=True)]


class MeanFlow(NamedTuple):
    """Row flow of the total and the weight of a mean."""

    total: RowFlow = RowFlow()
    weight: RowFlow = RowFlow()


@functools.lru_cache(maxsize=4)
def trace_mean_flows(case: LossCase) -> Mapping[str, MeanFlow]:
    """Return the row flow of each mean of a loss in training; empty if unknown.

    The flow is unknown if the loss takes only one number of rows, or traces to a different program
    for another number.
    """
    if case.half_error:
        return {}
    large, small = case.trace, dataclasses.replace(case, batch=case.half_batch).traced()
    inputs = [
        RowFlow(
            contents=argument == 2 and path[0].key not in NUMBERS_OF_A_ROW,
            drawn=argument == 3,
            flag=getattr(aval, "dtype", None) == jnp.bool,
        )
        for (argument, path), aval in zip(large.inputs, large.program.in_avals, strict=True)
    ]
    try:
        found = _FlowWalk(large.program, small.program).run(large.program, inputs)
    except DifferentProgramsError:
        return {}
    returned = jax.tree.unflatten(jax.tree.structure(large.returned), found)
    return {n: MeanFlow(mean.total, mean.weight) for n, mean in named_means(returned).items()}


def facts_of(case: LossCase, kind: str) -> dict[str, RowCoupling]:
    """Return the row coupling of one kind for each mean of a loss that has it."""
    return {
        name: part.facts[kind]
        for name, flow in trace_mean_flows(case).items()
        for part in flow
        if kind in part.facts
    }
