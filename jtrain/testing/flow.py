"""How values of different rows come together in a loss, read off its trace. Nothing is run.

A loss is traced for two numbers of rows. A dim that is longer in one trace than in the other is one
of rows, and for every value it is followed what was done to rows on the way to it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jtrain.core.jaxpr import inner_jaxprs
from jtrain.testing.float64 import CALLS, COUNTING
from jtrain.testing.where import CallStack

# They give each element a place among the others of a dim.
RANKS = {"sort", "top_k", "approx_top_k", "argmax", "argmin", "cumsum", "cummax", "cummin"}
# They put rows in the place of others.
MOVES = {"rev", "gather", "dynamic_slice", "slice", "concatenate", "pad", "dynamic_update_slice"}
# Sums, and what of a sum is a sum again.
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
    """An operation by which values of different rows come together."""

    operation: str
    line: str = ""
    """`losses.py:12`; empty where it is not known."""
    contents: bool = True
    """Whether what comes together was computed from more of a row than `row` and `mask`."""
    dtype: str = ""

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.operation} over rows{f' at {self.line}' if self.line else ''}"


Facts = Mapping[str, RowCoupling]


class RowFlow(NamedTuple):
    """What was done to the rows that a value was computed from.

    The facts, each the first operation of its kind:

    - `reduced`: the value holds a sum, or another reduction, over rows.
    - `meets`: what was reduced went back to rows.
    - `paired`: each row was put beside each other one.
    - `ranked`: rows were ranked among each other.
    - `moved`: rows were put in the place of others.
    - `function`: the value is no linear function of what was reduced.
    - `branch`: it was decided by what was reduced.
    - `narrow`: what was reduced was held in a float of 16 bits.
    - `whole`: rows were summed in whole numbers that are more than flags.

    - `mixed`: which rows were put where was drawn.
    """

    contents: bool = False
    """Whether it was computed from more of a row than its number and its mask."""
    drawn: bool = False
    """Whether it was computed from the key."""
    flag: bool = False
    """Whether it is 0 or 1."""
    facts: Facts = MappingProxyType({})


class DifferentError(Exception):
    """The two traces are not the same program."""


def flows(large: Any, small: Any, inputs: Sequence[RowFlow]) -> list[RowFlow]:
    """Return the flow of each output of a program.

    Args:
        large: the program, traced for some rows.
        small: the same for fewer.
        inputs: of each of its inputs, without a fact yet.

    Raises:
        DifferentError: if the two are not the same but for sizes.
    """
    large, small = _jaxpr(large), _jaxpr(small)
    flags = [getattr(atom.aval, "dtype", None) == jnp.bool for atom in large.invars]
    given = [flow._replace(flag=flag) for flow, flag in zip(inputs, flags, strict=True)]
    return _Walk().program(large, small, given)


class _Walk:
    """Goes along two traces of one program at once."""

    def __init__(self) -> None:
        self._where = CallStack()

    def program(self, large: Any, small: Any, inputs: Sequence[RowFlow]) -> list[RowFlow]:
        """The flow of each output."""
        if len(large.eqns) != len(small.eqns) or len(large.invars) != len(inputs):
            raise DifferentError
        known = dict(zip(large.invars, inputs, strict=True))

        def read(atom: Any) -> RowFlow:
            return RowFlow() if hasattr(atom, "val") else known.get(atom, RowFlow())

        for one, other in zip(large.eqns, small.eqns, strict=True):
            if one.primitive.name != other.primitive.name:
                raise DifferentError
            found = self._equation(one, other, [read(atom) for atom in one.invars])
            known |= zip(one.outvars, found, strict=True)
        return [read(atom) for atom in large.outvars]

    def _equation(self, one: Any, other: Any, given: Sequence[RowFlow]) -> Sequence[RowFlow]:
        name = one.primitive.name
        if name in CALLS:
            with self._where.inside(one):
                return self.program(inner_jaxprs(one)[0], inner_jaxprs(other)[0], given)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return special.get(name, self._primitive)(one, other, given)

    def _primitive(self, one: Any, other: Any, given: Sequence[RowFlow]) -> list[RowFlow]:
        name = one.primitive.name
        into, out = row_dims(one.invars, other.invars), row_dims(one.outvars, other.outvars)
        contents = any(flow.contents for flow in given)
        drawn = any(flow.drawn for flow in given)
        facts = _union(given)
        here = self._here(one, contents)
        sums = [i for i, flow in enumerate(given) if "reduced" in flow.facts and not into[i]]
        if name in RANKS and _along_rows(one, into):
            facts = _with(facts, "ranked", here)
        if sum(map(bool, into)) > 1 and any(len(dims) > 1 for dims in out):
            facts = _with(facts, "paired", here)
        if name in MOVES and any(into) and any(out) and _moves(one, other, into):
            facts = _with(facts, "moved", here)
            if any(flow.drawn for flow in given[1:]):
                facts = _with(facts, "mixed", here)
        if name == "select_n" and given[0].drawn and "moved" in facts:
            facts = _with(facts, "mixed", facts["moved"])
        if any(into) and not any(out):  # rows are reduced
            facts = _with(facts, "reduced", here)
            facts = facts if name in SUMS else _with(facts, "function", here)
            facts = _with(facts, "narrow", here) if _narrow(one) else facts
            facts = _with(facts, "whole", here) if _counts(one, given) else facts
        elif sums and any(out):  # what was reduced goes back to rows
            facts = _with(facts, "meets", _union([given[i] for i in sums])["reduced"])
        elif sums:
            by = sums[:1] if name == "select_n" else sums
            decided_by = any(given[i].contents for i in by)
            facts = _of_sums(one, facts, sums, here, decided_by=decided_by)
        flag = name in FLAGS or (name in KEEPS and all(flow.flag for flow in given))
        return [RowFlow(contents, drawn, flag, facts) for _ in one.outvars]

    def _here(self, equation: Any, contents: bool = True) -> RowCoupling:
        name, aval = equation.primitive.name, equation.outvars[0].aval
        return RowCoupling(
            name, self._where.line(equation), contents, str(getattr(aval, "dtype", ""))
        )

    def _scan(self, one: Any, other: Any, given: Sequence[RowFlow]) -> list[RowFlow]:
        body, small = (_jaxpr(equation.params["jaxpr"]) for equation in (one, other))
        carried = _of_same_rank(one.outvars, body.outvars)
        before = _of_same_rank(one.invars, body.invars)
        over_rows = one.params["length"] != other.params["length"]
        state = list(given)
        for i in range(before - carried, before) if over_rows else ():
            facts = _with(state[i].facts, "reduced", self._here(one))
            if _narrow_atom(one.invars[i]):
                facts = _with(facts, "narrow", self._here(one)._replace(dtype=_type(one.invars[i])))
            state[i] = RowFlow(True, state[i].drawn, False, facts)
        outputs: list[RowFlow] = []
        for _ in range(2):  # what goes around once more adds no fact
            with self._where.inside(one):
                outputs = self.program(body, small, state)
            for i in range(carried):
                at = before - carried + i
                state[at] = _joined(state[at], outputs[i])
        if over_rows:  # what each turn gives of the state goes back to its row
            outputs = [*outputs[:carried], *map(_back, outputs[carried:])]
        return outputs

    def _while(self, one: Any, other: Any, given: Sequence[RowFlow]) -> list[RowFlow]:
        part = lambda name: [_jaxpr(equation.params[name]) for equation in (one, other)]
        (asks, fewer), (does, less) = part("cond_jaxpr"), part("body_jaxpr")
        first, second = one.params["cond_nconsts"], one.params["body_nconsts"]
        asked, bound = list(given[:first]), list(given[first : first + second])
        carry = list(given[first + second :])
        with self._where.inside(one):
            for _ in range(2):
                turn = self.program(does, less, [*bound, *carry])
                carry = [_joined(*pair) for pair in zip(carry, turn, strict=True)]
            (again,) = self.program(asks, fewer, [*asked, *carry])
        return [_decided(flow, again, self._here(one)) for flow in carry]

    def _cond(self, one: Any, other: Any, given: Sequence[RowFlow]) -> list[RowFlow]:
        which, rest = given[0], given[1:]
        branches = zip(one.params["branches"], other.params["branches"], strict=True)
        with self._where.inside(one):
            found = [self.program(_jaxpr(a), _jaxpr(b), rest) for a, b in branches]
        here = self._here(one)
        return [_decided(_joined(*flows), which, here) for flows in zip(*found, strict=True)]


def _of_sums(
    one: Any, facts: Facts, sums: Sequence[int], here: RowCoupling, *, decided_by: bool
) -> Facts:
    """The facts of an operation on what was reduced over rows, and on nothing that has rows."""
    name = one.primitive.name
    decides = name in DECISIONS or (name == "select_n" and 0 in sums)
    if decides:
        facts = _with(facts, "branch", here._replace(contents=decided_by))
    if name in COMPARISONS:  # it holds no sum any more, only what was decided by one
        return {kind: meeting for kind, meeting in facts.items() if kind != "reduced"}
    product = name in PRODUCTS and (len(sums) > 1 or (name == "div" and 1 in sums))
    if product or (name not in LINEAR | SUMS | PRODUCTS and not decides):
        facts = _with(facts, "function", here)
    return _with(facts, "narrow", here) if _narrow(one) else facts


def _with(facts: Facts, kind: str, meeting: RowCoupling) -> Facts:
    """The facts with one more; what comes of the contents of rows stands before the rest."""
    old = facts.get(kind)
    if old is None or (meeting.contents and not old.contents):
        return {**facts, kind: meeting}
    return facts


def _union(given: Sequence[RowFlow]) -> Facts:
    facts: Facts = {}
    for flow in given:
        for kind, meeting in flow.facts.items():
            facts = _with(facts, kind, meeting)
    return facts


def _narrow(equation: Any) -> bool:
    return _narrow_atom(equation.outvars[0])


def _narrow_atom(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _counts(equation: Any, given: Sequence[RowFlow]) -> bool:
    """Whether it sums whole numbers that may come to more than their type holds."""
    dtype = equation.outvars[0].aval.dtype
    if equation.primitive.name not in {"reduce_sum", "dot_general"} or dtype not in COUNTING:
        return False
    return dtype.itemsize < 4 or not all(flow.flag for flow in given)


def _type(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", ""))


def _jaxpr(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


def _back(flow: RowFlow) -> RowFlow:
    reduced = flow.facts.get("reduced")
    if reduced is None:
        return flow
    return flow._replace(facts=_with(flow.facts, "meets", reduced))


def _decided(flow: RowFlow, by: RowFlow, here: RowCoupling) -> RowFlow:
    """A flow that was chosen by another."""
    facts = flow.facts
    if {"reduced", "branch"} & by.facts.keys():
        sums = [by.facts[kind] for kind in ("branch", "reduced") if kind in by.facts]
        contents = any(meeting.contents for meeting in sums)
        line = here.line or sums[0].line
        facts = _with(facts, "branch", here._replace(contents=contents, line=line))
    either = flow.contents or by.contents, flow.drawn or by.drawn
    return RowFlow(*either, facts=facts)


def _joined(*given: RowFlow) -> RowFlow:
    contents, drawn = any(flow.contents for flow in given), any(flow.drawn for flow in given)
    return RowFlow(contents, drawn, all(flow.flag for flow in given), _union(given))


def _of_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)


def _along_rows(equation: Any, into: Sequence[set[int]]) -> bool:
    params = equation.params
    if equation.primitive.name in {"top_k", "approx_top_k"}:
        along = {len(equation.invars[0].aval.shape) - 1}
    elif "axes" in params:
        along = set(params["axes"])
    else:
        along = {params.get("dimension", params.get("axis", 0))}
    return any(along & dims for dims in into)


def _moves(one: Any, other: Any, into: Sequence[set[int]]) -> bool:
    """Whether an operation that only moves numbers moves them along rows."""
    name, params, dims = one.primitive.name, one.params, into[0]
    if name == "rev":
        return bool(dims & set(params["dimensions"]))
    if name == "concatenate":
        return any(params["dimension"] in dims for dims in into)
    if name == "gather":
        return bool(dims & set(params["dimension_numbers"].start_index_map))
    # Otherwise where the dim of rows gets shorter, or longer.
    shapes = [(e.invars[0].aval.shape, e.outvars[0].aval.shape) for e in (one, other)]
    return any(i < len(b) and a[i] != b[i] for a, b in shapes for i in dims)


def row_dims(large: Sequence[Any], small: Sequence[Any]) -> list[set[int]]:
    """Return of each array the dims that differ between two traces: those of rows."""

    def dims(a: Any, b: Any) -> set[int]:
        shapes = zip(getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ()), strict=False)
        return {i for i, (x, y) in enumerate(shapes) if x != y}

    return [dims(a, b) for a, b in zip(large, small, strict=True)]
