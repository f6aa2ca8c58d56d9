"""Row flow: operations that combine values of different rows, from the trace of a loss alone.

A loss is traced for two numbers of rows. A dim whose size differs between the traces is a dim of
rows. For every value the walk collects what was done to the rows that it was computed from.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jtrain.core.jaxpr import called_jaxpr, inner_jaxprs, open_jaxpr, scan_sizes
from jtrain.inspect.debug.source import SourceLine, find_source
from jtrain.testing.float64 import COUNTING


class CallStack:
    """The stack of calls around the current equation, for its source line."""

    def __init__(self) -> None:
        self._calls: list[Any] = []

    @contextlib.contextmanager
    def inside(self, call: Any) -> Iterator[None]:
        """Push an equation that calls a program while the program is walked."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()

    def line(self, equation: Any) -> str:
        """Return the innermost line of the loss, `losses.py:12`; empty if unknown."""
        line = self._lines(equation)[-1:]
        return f"{Path(line[0].file).name}:{line[0].line}" if line else ""

    def _lines(self, equation: Any) -> list[SourceLine]:
        """Return the line of jtrain, if there is one, and the line of the loss."""
        jitted = [call for call in self._calls if "name" in call.params]
        lines = find_source(equation, jitted)
        for call in reversed(self._calls):
            if lines and not lines[-1].in_jtrain:
                break
            lines = [*lines[:1], *(line for line in find_source(call) if not line.in_jtrain)]
        return lines


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


class DifferentError(Exception):
    """Two traces that are not the same program."""


def trace_flows(large: Any, small: Any, inputs: Sequence[RowFlow]) -> list[RowFlow]:
    """Return the flow of each output of a program.

    Args:
        large: the program, traced for some rows.
        small: the program, traced for fewer rows.
        inputs: the flow of each input, without facts.

    Raises:
        DifferentError: if the programs differ in more than sizes.
    """
    large, small = _jaxpr(large), _jaxpr(small)
    flags = [getattr(atom.aval, "dtype", None) == jnp.bool for atom in large.invars]
    flows_in = [flow._replace(flag=flag) for flow, flag in zip(inputs, flags, strict=True)]
    return _FlowWalk().program(large, small, flows_in)


class _FlowWalk:
    """A simultaneous walk over two traces of one program."""

    def __init__(self) -> None:
        self._where = CallStack()

    def program(self, large: Any, small: Any, inputs: Sequence[RowFlow]) -> list[RowFlow]:
        """Return the flow of each output."""
        if len(large.eqns) != len(small.eqns) or len(large.invars) != len(inputs):
            raise DifferentError
        flow_of = dict(zip(large.invars, inputs, strict=True))

        def read(atom: Any) -> RowFlow:
            return RowFlow() if hasattr(atom, "val") else flow_of.get(atom, RowFlow())

        for one, other in zip(large.eqns, small.eqns, strict=True):
            if one.primitive.name != other.primitive.name:
                raise DifferentError
            found = self._equation(one, other, [read(atom) for atom in one.invars])
            flow_of |= zip(one.outvars, found, strict=True)
        return [read(atom) for atom in large.outvars]

    def _equation(self, one: Any, other: Any, flows_in: Sequence[RowFlow]) -> Sequence[RowFlow]:
        name = one.primitive.name
        if called_jaxpr(one) is not None:
            with self._where.inside(one):
                return self.program(inner_jaxprs(one)[0], inner_jaxprs(other)[0], flows_in)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return special.get(name, self._primitive)(one, other, flows_in)

    def _primitive(self, one: Any, other: Any, flows_in: Sequence[RowFlow]) -> list[RowFlow]:
        name = one.primitive.name
        into, out = (
            find_row_dims(one.invars, other.invars),
            find_row_dims(one.outvars, other.outvars),
        )
        contents = any(flow.contents for flow in flows_in)
        drawn = any(flow.drawn for flow in flows_in)
        facts = _merge_facts(flows_in)
        coupling = self._coupling(one, contents)
        sums = [i for i, flow in enumerate(flows_in) if "reduced" in flow.facts and not into[i]]
        if name in RANKS and _ranks_rows(one, into):
            facts = _add_fact(facts, "ranked", coupling)
        if sum(map(bool, into)) > 1 and any(len(dims) > 1 for dims in out):
            facts = _add_fact(facts, "paired", coupling)
        if name in MOVES and any(into) and any(out) and _moves_rows(one, other, into):
            facts = _add_fact(facts, "moved", coupling)
            if any(flow.drawn for flow in flows_in[1:]):
                facts = _add_fact(facts, "mixed", coupling)
        if name == "select_n" and flows_in[0].drawn and "moved" in facts:
            facts = _add_fact(facts, "mixed", facts["moved"])
        if any(into) and not any(out):  # rows are reduced
            facts = _add_fact(facts, "reduced", coupling)
            facts = facts if name in SUMS else _add_fact(facts, "function", coupling)
            facts = _add_fact(facts, "narrow", coupling) if _is_narrow(one) else facts
            facts = _add_fact(facts, "whole", coupling) if _may_overflow(one, flows_in) else facts
        elif sums and any(out):  # a reduced value is broadcast to rows
            facts = _add_fact(facts, "meets", _merge_facts([flows_in[i] for i in sums])["reduced"])
        elif sums:
            deciding = sums[:1] if name == "select_n" else sums
            decided_by = any(flows_in[i].contents for i in deciding)
            facts = _reduced_facts(one, facts, sums, coupling, decided_by=decided_by)
        flag = name in FLAGS or (name in KEEPS and all(flow.flag for flow in flows_in))
        return [RowFlow(contents, drawn, flag, facts) for _ in one.outvars]

    def _coupling(self, equation: Any, contents: bool = True) -> RowCoupling:
        name, aval = equation.primitive.name, equation.outvars[0].aval
        return RowCoupling(
            name, self._where.line(equation), contents, str(getattr(aval, "dtype", ""))
        )

    def _scan(self, one: Any, other: Any, flows_in: Sequence[RowFlow]) -> list[RowFlow]:
        body, small = (_jaxpr(equation.params["jaxpr"]) for equation in (one, other))
        constants, carried = scan_sizes(one, body)
        before = constants + carried
        over_rows = one.params["length"] != other.params["length"]
        state = list(flows_in)
        for i in range(before - carried, before) if over_rows else ():
            facts = _add_fact(state[i].facts, "reduced", self._coupling(one))
            if _is_narrow_atom(one.invars[i]):
                facts = _add_fact(
                    facts, "narrow", self._coupling(one)._replace(dtype=_dtype_name(one.invars[i]))
                )
            state[i] = RowFlow(True, state[i].drawn, False, facts)
        outputs: list[RowFlow] = []
        for _ in range(2):  # a third turn adds no fact
            with self._where.inside(one):
                outputs = self.program(body, small, state)
            for i in range(carried):
                at = before - carried + i
                state[at] = _join(state[at], outputs[i])
        if over_rows:  # the stacked states go back to their rows
            outputs = [*outputs[:carried], *map(_broadcast_back, outputs[carried:])]
        return outputs

    def _while(self, one: Any, other: Any, flows_in: Sequence[RowFlow]) -> list[RowFlow]:
        part = lambda name: [_jaxpr(equation.params[name]) for equation in (one, other)]
        (condition, small_condition), (body, small_body) = part("cond_jaxpr"), part("body_jaxpr")
        first, second = one.params["cond_nconsts"], one.params["body_nconsts"]
        condition_constants, body_constants = (
            list(flows_in[:first]),
            list(flows_in[first : first + second]),
        )
        carry = list(flows_in[first + second :])
        with self._where.inside(one):
            for _ in range(2):
                turn = self.program(body, small_body, [*body_constants, *carry])
                carry = [_join(*pair) for pair in zip(carry, turn, strict=True)]
            (repeat,) = self.program(condition, small_condition, [*condition_constants, *carry])
        return [_branch_flow(flow, repeat, self._coupling(one)) for flow in carry]

    def _cond(self, one: Any, other: Any, flows_in: Sequence[RowFlow]) -> list[RowFlow]:
        index, rest = flows_in[0], flows_in[1:]
        branches = zip(one.params["branches"], other.params["branches"], strict=True)
        with self._where.inside(one):
            found = [self.program(_jaxpr(a), _jaxpr(b), rest) for a, b in branches]
        coupling = self._coupling(one)
        return [_branch_flow(_join(*flows), index, coupling) for flows in zip(*found, strict=True)]


def _reduced_facts(
    one: Any, facts: Facts, sums: Sequence[int], coupling: RowCoupling, *, decided_by: bool
) -> Facts:
    """Return the facts of an operation whose inputs are all reduced over rows."""
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


def _merge_facts(flows_in: Sequence[RowFlow]) -> Facts:
    facts: Facts = {}
    for flow in flows_in:
        for kind, coupling in flow.facts.items():
            facts = _add_fact(facts, kind, coupling)
    return facts


def _is_narrow(equation: Any) -> bool:
    return _is_narrow_atom(equation.outvars[0])


def _is_narrow_atom(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _may_overflow(equation: Any, flows_in: Sequence[RowFlow]) -> bool:
    """Return whether an equation sums integers that may overflow their type."""
    dtype = equation.outvars[0].aval.dtype
    if equation.primitive.name not in {"reduce_sum", "dot_general"} or dtype not in COUNTING:
        return False
    return dtype.itemsize < 4 or not all(flow.flag for flow in flows_in)


def _jaxpr(program: Any) -> Any:
    return open_jaxpr(program)[0]


def _dtype_name(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", ""))


def _broadcast_back(flow: RowFlow) -> RowFlow:
    reduced = flow.facts.get("reduced")
    if reduced is None:
        return flow
    return flow._replace(facts=_add_fact(flow.facts, "meets", reduced))


def _branch_flow(flow: RowFlow, decision: RowFlow, coupling: RowCoupling) -> RowFlow:
    """Return a flow that a branch on another value has selected."""
    facts = flow.facts
    if {"reduced", "branch"} & decision.facts.keys():
        sums = [decision.facts[kind] for kind in ("branch", "reduced") if kind in decision.facts]
        contents = any(coupling.contents for coupling in sums)
        line = coupling.line or sums[0].line
        facts = _add_fact(facts, "branch", coupling._replace(contents=contents, line=line))
    either = flow.contents or decision.contents, flow.drawn or decision.drawn
    return RowFlow(*either, facts=facts)


def _join(*flows_in: RowFlow) -> RowFlow:
    contents, drawn = any(flow.contents for flow in flows_in), any(flow.drawn for flow in flows_in)
    return RowFlow(contents, drawn, all(flow.flag for flow in flows_in), _merge_facts(flows_in))


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
    """Return whether an operation of MOVES moves values along rows."""
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
