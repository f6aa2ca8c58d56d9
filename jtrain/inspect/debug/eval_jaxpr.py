"""Execution of traced programs, one primitive at a time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.interpret import PROGRAMS, Equation, Interpreter, bind


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
    """Calls and loops around it, outermost first."""


def execute(
    program: Any, inputs: Sequence[Any], record: Callable[[ExecutedOp], None]
) -> list[TracedValue]:
    """Execute `program` (`jax.make_jaxpr(fn)(...)`); return its outputs.

    Loops run turn by turn, and only the selected branches run. The inputs have the numbers 0, 1,
    ....

    Args:
        record: called with each primitive after it was executed.
    """
    execution = _Execution(record)
    return execution.run(program, [execution.number(x) for x in inputs])


class _Execution(Interpreter[TracedValue]):
    enters = PROGRAMS - {"shard_map", "custom_partitioning"}

    def __init__(self, record: Callable[[ExecutedOp], None]):
        self._record = record
        self._numbers = itertools.count()
        self._turn: tuple[int, ...] = ()

    def number(self, array: Any) -> TracedValue:
        return TracedValue(array, next(self._numbers))

    def constant(self, value: Any, aval: Any) -> TracedValue:
        return self.number(value)

    def operation(self, equation: Equation, inputs: list[TracedValue]) -> list[TracedValue]:
        return self._made(equation, inputs, bind(equation, [value.array for value in inputs]))

    def cond(self, equation: Equation, index: TracedValue, branches: Any) -> list[TracedValue]:
        return branches[int(jnp.clip(index.array, 0, len(branches) - 1))]()

    def while_loop(
        self, equation: Equation, condition: Any, turn: Any, carry: list[TracedValue]
    ) -> list[TracedValue]:
        around = self._turn
        for number in itertools.count():
            self._turn = (*around, number)
            if not condition(carry).array:
                break
            carry = turn(carry)
        self._turn = around
        return carry

    def scan(
        self, equation: Equation, turn: Any, carry: list[TracedValue], rows: list[TracedValue]
    ) -> list[TracedValue]:
        around, order = self._turn, range(equation.params["length"])
        backwards, count = equation.params["reverse"], len(carry)
        stacks: list[list[TracedValue]] = [[] for _ in equation.outvars[count:]]
        for number in reversed(order) if backwards else order:
            self._turn = (*around, number)
            parts = [self._made(equation, [x], [x.array[number]])[0] for x in rows]
            outputs = turn(carry, parts)
            carry = outputs[:count]
            for stack, value in zip(stacks, outputs[count:], strict=True):
                stack.append(value)
        self._turn = around
        stacked = []
        for stack, outside in zip(stacks, equation.outvars[count:], strict=True):
            stack, aval = stack[::-1] if backwards else stack, outside.aval
            array = (
                jnp.stack([v.array for v in stack]) if stack else jnp.zeros(aval.shape, aval.dtype)
            )
            stacked += self._made(equation, stack, [array])
        return [*carry, *stacked]

    def _made(
        self, equation: Equation, inputs: Sequence[TracedValue], arrays: Sequence[Any]
    ) -> list[TracedValue]:
        """Number and record the outputs of an operation."""
        outputs = [self.number(array) for array in arrays]
        self._record(ExecutedOp(equation, inputs, outputs, self._turn, self.calls))
        return outputs


def evaluate(program: Any, inputs: Sequence[Any]) -> list[jax.Array]:
    """Return the outputs of `program`, computed one primitive at a time."""
    return [value.array for value in execute(program, inputs, lambda executed: None)]
