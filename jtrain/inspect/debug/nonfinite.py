"""Execution of traced programs by primitives, with the origin of each nonfinite value."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.interpret import PROGRAMS, Equation, Interpreter, bind
from jtrain.inspect.debug.source import SourceLine, find_source


@dataclasses.dataclass(frozen=True)
class NonfiniteOrigin:
    """An operation that made an infinity from finite inputs, or a NaN from inputs without NaN.

    Or an input of the program that is not finite: it has no `equation`.
    """

    what: str
    """`log(0.0) = -inf`, or ``row 3 of `x` is nan``."""
    place: tuple[int, ...]
    """Index of the first nonfinite element."""
    dtype: str
    detail: str
    """Place and extent of the nonfinite elements."""
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


class TracedValue(NamedTuple):
    """An array with the origins of its nonfinite elements."""

    array: Any
    number: int  # unique in the execution, and increasing in its order
    nan: bool = False
    origins: tuple[NonfiniteOrigin, ...] = ()
    """Earliest first: an infinity that became a NaN has that of the infinity, and its own."""


class NonfiniteTrace(Interpreter[TracedValue]):
    """The execution of a traced program, with the origin of each value that is not finite.

    Loops run turn by turn, and of a cond the selected branch.
    """

    enters = PROGRAMS - {"shard_map", "custom_partitioning"}

    def __init__(self, program: Any, inputs: Sequence[Any]):
        self._numbers = itertools.count()
        self._turn: tuple[int, ...] = ()
        given = [self._input(index, array) for index, array in enumerate(inputs)]
        self.outputs = self.run(program, given)

    def constant(self, value: Any, aval: Any) -> TracedValue:
        """Number a constant."""
        return self._number(value)

    def operation(self, equation: Equation, inputs: list[TracedValue]) -> list[TracedValue]:
        """Execute a primitive."""
        return self._made(equation, inputs, bind(equation, [value.array for value in inputs]))

    def cond(self, equation: Equation, index: TracedValue, branches: Any) -> list[TracedValue]:
        """Execute the selected branch."""
        return branches[int(jnp.clip(index.array, 0, len(branches) - 1))]()

    def while_loop(
        self, equation: Equation, condition: Any, turn: Any, carry: list[TracedValue]
    ) -> list[TracedValue]:
        """Execute a loop turn by turn."""
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
        """Execute a loop turn by turn, and stack what it returns."""
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

    def broken(self, value: TracedValue) -> bool:
        """Return whether an output of the program is not finite."""
        return bool(value.origins) or _nonfinite_values(value.array) is not None

    def origins(self, value: TracedValue) -> list[NonfiniteOrigin]:
        """Return the origins of an output that is not finite, earliest first."""
        return list(value.origins)

    def _number(self, array: Any) -> TracedValue:
        return TracedValue(array, next(self._numbers))

    def _input(self, index: int, array: Any) -> TracedValue:
        values, made = _nonfinite_values(array), self._number(array)
        if values is None:
            return made
        place, extent = _extent(values)
        what, detail = f"is {float(values[place]):g}", f"{extent} of its numbers are not finite"
        origin = NonfiniteOrigin(what, place, str(values.dtype), detail, index=index)
        return made._replace(nan=bool(np.isnan(values).any()), origins=(origin,))

    def _made(
        self, equation: Equation, inputs: Sequence[TracedValue], arrays: Sequence[Any]
    ) -> list[TracedValue]:
        """Number the outputs of an operation, with the origins of those that are not finite."""
        outputs = [self._number(array) for array in arrays]
        for i, output in enumerate(outputs):
            values = _nonfinite_values(output.array)
            if values is None:
                continue
            parents = [x for x in _source_inputs(equation, inputs, values) if x.origins]
            nan = bool(np.isnan(values).any())
            causes = [value for value in parents if value.nan or not nan]
            first = min(causes or parents, key=lambda value: value.number, default=None)
            origins = first.origins if first else ()
            if not causes:
                origins = (*origins, self._origin(equation, inputs, values))
            outputs[i] = output._replace(nan=nan, origins=origins)
        return outputs

    def _origin(
        self, equation: Equation, inputs: Sequence[TracedValue], values: np.ndarray
    ) -> NonfiniteOrigin:
        """Return an operation as the origin of the nonfinite elements of an output."""
        place, extent = _extent(values)
        turn = "".join(f", turn {number} of a loop" for number in self._turn)
        detail = f"at {list(place)} of {values.dtype}{list(values.shape)}, {extent}{turn}"
        return NonfiniteOrigin(
            _describe_operation(equation, inputs, values, place),
            place,
            str(values.dtype),
            detail if values.shape else turn.strip(", "),
            equation,
            turn=self._turn,
            calls=self.calls,
        )


def _nonfinite_values(x: Any) -> np.ndarray | None:
    """Return `x` as a numpy array if an element is NaN or infinite; else None."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return None
    host = np.asarray(x)
    return None if np.isfinite(host).all() else host


def _source_inputs(
    equation: Equation, inputs: Sequence[TracedValue], values: np.ndarray
) -> Sequence[TracedValue]:
    """Return the inputs that the nonfinite elements were computed from."""
    if equation.primitive.name != "select_n":
        return inputs
    chosen = np.broadcast_to(np.asarray(inputs[0].array), values.shape)
    return [inputs[1 + int(i)] for i in np.unique(chosen[~np.isfinite(values)])]


def _describe_operation(
    equation: Equation, inputs: Sequence[TracedValue], values: np.ndarray, place: tuple[int, ...]
) -> str:
    """Return an operation with its inputs at a place, or their ranges: `log(0.0) = -inf`."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    arrays = [np.asarray(value.array) for value in inputs if not is_key(value.array)]
    if all(x.shape in {(), values.shape} for x in arrays):
        arguments = [_format(x[place] if x.shape else x) for x in arrays]
    else:
        arguments = [_format_range(x) for x in arrays]
    return f"{equation.primitive.name}({', '.join(arguments)}) = {_format(values[place])}"


def _extent(values: np.ndarray) -> tuple[tuple[int, ...], str]:
    """Return the first place, and the number, of the NaNs; of the infinities if there is none."""
    nonfinite = np.isnan(values) if np.isnan(values).any() else ~np.isfinite(values)
    place = tuple(np.argwhere(nonfinite)[0].tolist())
    return place, f"{int(nonfinite.sum())} of {values.size}"


def _format(x: Any) -> str:
    return f"{float(x):.6g}" if jnp.issubdtype(x.dtype, jnp.floating) else str(x)


def _format_range(x: np.ndarray) -> str:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        return f"{x.dtype}{list(x.shape)}"
    finite = x[np.isfinite(x)].astype(np.float64)
    low_high = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else "none finite"
    return f"{x.dtype}{list(x.shape)} of {low_high}"
