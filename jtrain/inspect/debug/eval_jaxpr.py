"""An interpreter of traced programs, one primitive at a time."""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import called_jaxpr, open_jaxpr, scan_sizes

Equation: TypeAlias = Any  # of a jaxpr


class TracedValue(NamedTuple):
    """An array with a number, unique in the execution and increasing in its order."""

    array: Any
    number: int


class ExecutedOp(NamedTuple):
    """An executed primitive."""

    equation: Equation
    inputs: Sequence[TracedValue]
    outputs: Sequence[TracedValue]
    turn: tuple[int, ...]
    """Turn of each loop around it, from 0."""
    calls: tuple[Equation, ...]
    """Calls of jitted functions around it, outermost first."""


class _Context(NamedTuple):
    turn: tuple[int, ...] = ()
    calls: tuple[Equation, ...] = ()

    def loop(self, number: int) -> "_Context":
        return _Context((*self.turn, number), self.calls)

    def call(self, equation: Equation) -> "_Context":
        return _Context(self.turn, (*self.calls, equation))


def execute(program: Any, inputs: Sequence[Any]) -> Iterator[ExecutedOp | list[TracedValue]]:
    """Execute `program` (`jax.make_jaxpr(fn)(...)`); yield each primitive, and last the outputs.

    Loops run turn by turn, and only the selected branches run. The inputs have the numbers 0, 1,
    ....
    """
    numbers = itertools.count()
    values = [TracedValue(x, next(numbers)) for x in inputs]
    yield (yield from _Execution(numbers).run(program, values, _Context()))


class _Execution:
    def __init__(self, numbers: Iterator[int]):
        self._numbers = numbers

    def run(self, program: Any, inputs: Sequence[TracedValue], context: _Context) -> Any:
        """Yield each executed primitive; return the outputs."""
        jaxpr, constants = open_jaxpr(program)
        environment = dict(zip(jaxpr.constvars, map(self._new, constants), strict=True))
        environment |= zip(jaxpr.invars, inputs, strict=True)
        last_uses = _last_uses(jaxpr)
        for index, equation in enumerate(jaxpr.eqns):
            arguments = [self._read(environment, atom) for atom in equation.invars]
            outputs = yield from self._equation(equation, arguments, context)
            environment |= zip(equation.outvars, outputs, strict=True)
            for atom in {*_variables(equation.invars), *equation.outvars}:
                if last_uses.get(atom, -1) <= index:
                    environment.pop(atom, None)  # free its memory
        return [self._read(environment, atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, inputs: list[TracedValue], context: _Context) -> Any:
        name, params = equation.primitive.name, equation.params
        if (program := called_jaxpr(equation)) is not None:
            inner = context.call(equation) if "name" in params else context
            return (yield from self.run(program, inputs, inner))
        if name == "cond":
            index = int(jnp.clip(inputs[0].array, 0, len(params["branches"]) - 1))
            return (yield from self.run(params["branches"][index], inputs[1:], context))
        if name == "while" and "cond_nconsts" in params:
            return (yield from self._while(params, inputs, context))
        if name == "scan":
            return (yield from self._scan(equation, inputs, context))
        prepared = equation.primitive.get_bind_params(params)
        found = equation.primitive.bind(*(value.array for value in inputs), **prepared)
        outputs = [
            self._new(x) for x in (found if equation.primitive.multiple_results else [found])
        ]
        yield ExecutedOp(equation, inputs, outputs, *context)
        return outputs

    def _while(self, params: Any, inputs: list[TracedValue], context: _Context) -> Any:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = inputs[:first], inputs[first : first + second]
        carry = inputs[first + second :]
        for number in itertools.count():
            inner = context.loop(number)
            (proceed,) = yield from self.run(params["cond_jaxpr"], [*cond_consts, *carry], inner)
            if not proceed.array:
                return carry
            carry = yield from self.run(params["body_jaxpr"], [*body_consts, *carry], inner)

    def _scan(self, equation: Equation, inputs: list[TracedValue], context: _Context) -> Any:
        body, length = equation.params["jaxpr"], equation.params["length"]
        jaxpr = getattr(body, "jaxpr", body)
        consts, carried = scan_sizes(equation, jaxpr)
        body_consts, carry = inputs[:consts], inputs[consts : consts + carried]
        stacks, rows = inputs[consts + carried :], [[] for _ in jaxpr.outvars[carried:]]
        order = range(length)
        for number in reversed(order) if equation.params["reverse"] else order:
            inner = context.loop(number)
            parts = [self._new(stack.array[number]) for stack in stacks]
            for stack, part in zip(stacks, parts, strict=True):
                yield ExecutedOp(equation, [stack], [part], *inner)
            found = yield from self.run(body, [*body_consts, *carry, *parts], inner)
            carry = found[:carried]
            for row, value in zip(rows, found[carried:], strict=True):
                row.append(value)
        if equation.params["reverse"]:
            rows = [row[::-1] for row in rows]
        stacked = []
        for row, outside in zip(rows, equation.outvars[carried:], strict=True):
            aval = outside.aval
            stack = jnp.stack([v.array for v in row]) if row else jnp.zeros(aval.shape, aval.dtype)
            stacked.append(self._new(stack))
            yield ExecutedOp(equation, row, stacked[-1:], *context)
        return [*carry, *stacked]

    def _new(self, array: Any) -> TracedValue:
        return TracedValue(array, next(self._numbers))

    def _read(self, environment: dict[Any, TracedValue], atom: Any) -> TracedValue:
        return self._new(atom.val) if hasattr(atom, "val") else environment[atom]  # a literal


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _last_uses(jaxpr: Any) -> dict[Any, int]:
    """Return the index of the last equation that reads each variable; outputs stay."""
    uses = {atom: i for i, e in enumerate(jaxpr.eqns) for atom in _variables(e.invars)}
    return uses | dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))


def evaluate(program: Any, inputs: Sequence[Any]) -> list[jax.Array]:
    """Return the outputs of `program`, computed one primitive at a time."""
    (last,) = collections.deque(execute(program, inputs), maxlen=1)
    assert isinstance(last, list), "the outputs come last"
    return [value.array for value in last]
