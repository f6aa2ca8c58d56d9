"""Runs a traced program one primitive at a time, so that each value can be looked at."""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import called_jaxpr, open_jaxpr, scan_sizes

Equation: TypeAlias = Any  # of a jaxpr


class TracedValue(NamedTuple):
    """An array, and a number that no other value of the program has; later ones have higher."""

    array: Any
    number: int


class ExecutedOp(NamedTuple):
    """A primitive that was run."""

    equation: Equation
    inputs: Sequence[TracedValue]
    outputs: Sequence[TracedValue]
    turn: tuple[int, ...]
    """Of each loop around it the turn, from 0."""
    calls: tuple[Equation, ...]
    """The calls of jitted functions around it, the outermost first."""


class _Inside(NamedTuple):
    turn: tuple[int, ...] = ()
    calls: tuple[Equation, ...] = ()

    def loop(self, number: int) -> "_Inside":
        return _Inside((*self.turn, number), self.calls)

    def call(self, equation: Equation) -> "_Inside":
        return _Inside(self.turn, (*self.calls, equation))


def execute(program: Any, inputs: Sequence[Any]) -> Iterator[ExecutedOp | list[TracedValue]]:
    """Each primitive of `program` (`jax.make_jaxpr(fn)(...)`) as it is done; the outputs at last.

    Loops are run turn by turn and branches where they lead, with the values at hand. The inputs
    have the numbers 0, 1, ....
    """
    numbers = itertools.count()
    values = [TracedValue(x, next(numbers)) for x in inputs]
    yield (yield from _Execution(numbers).run(program, values, _Inside()))


class _Execution:
    def __init__(self, numbers: Iterator[int]):
        self._numbers = numbers

    def run(self, program: Any, inputs: Sequence[TracedValue], inside: _Inside) -> Any:
        """Yields what is done; gives back the outputs."""
        jaxpr, constants = open_jaxpr(program)
        known = dict(zip(jaxpr.constvars, map(self._new, constants), strict=True))
        known |= zip(jaxpr.invars, inputs, strict=True)
        needed = _last_uses(jaxpr)
        for place, equation in enumerate(jaxpr.eqns):
            got = [self._read(known, atom) for atom in equation.invars]
            outputs = yield from self._equation(equation, got, inside)
            known |= zip(equation.outvars, outputs, strict=True)
            for atom in {*_variables(equation.invars), *equation.outvars}:
                if needed.get(atom, -1) <= place:
                    known.pop(atom, None)  # free its memory
        return [self._read(known, atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, inputs: list[TracedValue], inside: _Inside) -> Any:
        name, params = equation.primitive.name, equation.params
        if (program := called_jaxpr(equation)) is not None:
            here = inside.call(equation) if "name" in params else inside
            return (yield from self.run(program, inputs, here))
        if name == "cond":
            which = int(jnp.clip(inputs[0].array, 0, len(params["branches"]) - 1))
            return (yield from self.run(params["branches"][which], inputs[1:], inside))
        if name == "while" and "cond_nconsts" in params:
            return (yield from self._while(params, inputs, inside))
        if name == "scan":
            return (yield from self._scan(equation, inputs, inside))
        prepared = equation.primitive.get_bind_params(params)
        found = equation.primitive.bind(*(value.array for value in inputs), **prepared)
        outputs = [
            self._new(x) for x in (found if equation.primitive.multiple_results else [found])
        ]
        yield ExecutedOp(equation, inputs, outputs, *inside)
        return outputs

    def _while(self, params: Any, inputs: list[TracedValue], inside: _Inside) -> Any:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        asked, bound = inputs[:first], inputs[first : first + second]
        carry = inputs[first + second :]
        for number in itertools.count():
            here = inside.loop(number)
            (again,) = yield from self.run(params["cond_jaxpr"], [*asked, *carry], here)
            if not again.array:
                return carry
            carry = yield from self.run(params["body_jaxpr"], [*bound, *carry], here)

    def _scan(self, equation: Equation, inputs: list[TracedValue], inside: _Inside) -> Any:
        body, length = equation.params["jaxpr"], equation.params["length"]
        jaxpr = getattr(body, "jaxpr", body)
        consts, carried = scan_sizes(equation, jaxpr)
        bound, carry = inputs[:consts], inputs[consts : consts + carried]
        stacks, rows = inputs[consts + carried :], [[] for _ in jaxpr.outvars[carried:]]
        order = range(length)
        for number in reversed(order) if equation.params["reverse"] else order:
            here = inside.loop(number)
            parts = [self._new(stack.array[number]) for stack in stacks]
            for stack, part in zip(stacks, parts, strict=True):
                yield ExecutedOp(equation, [stack], [part], *here)
            found = yield from self.run(body, [*bound, *carry, *parts], here)
            carry = found[:carried]
            for row, value in zip(rows, found[carried:], strict=True):
                row.append(value)
        if equation.params["reverse"]:
            rows = [row[::-1] for row in rows]
        stacked = []
        for row, outside in zip(rows, equation.outvars[carried:], strict=True):
            aval = outside.aval
            whole = jnp.stack([v.array for v in row]) if row else jnp.zeros(aval.shape, aval.dtype)
            stacked.append(self._new(whole))
            yield ExecutedOp(equation, row, stacked[-1:], *inside)
        return [*carry, *stacked]

    def _new(self, array: Any) -> TracedValue:
        return TracedValue(array, next(self._numbers))

    def _read(self, known: dict[Any, TracedValue], atom: Any) -> TracedValue:
        return self._new(atom.val) if hasattr(atom, "val") else known[atom]  # a literal


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _last_uses(jaxpr: Any) -> dict[Any, int]:
    """Of each variable the place of the last equation that reads it; outputs are kept."""
    uses = {atom: i for i, e in enumerate(jaxpr.eqns) for atom in _variables(e.invars)}
    return uses | dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))


def outputs_of(program: Any, inputs: Sequence[Any]) -> list[jax.Array]:
    """What `program` gives for `inputs`, computed one primitive at a time."""
    (last,) = collections.deque(execute(program, inputs), maxlen=1)
    assert isinstance(last, list), "the outputs come last"
    return [value.array for value in last]
