"""Execution of traced programs by primitives, with the origin of each nonfinite value."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.interpret import PROGRAMS, Equation, Interpreter, bind
from jtrain.inspect.debug.source import SourceLine, find_source


class TracedValue(NamedTuple):
    """An array with a number, unique in the execution and increasing in its order."""

    array: Any
    number: int


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


class NonfiniteTrace(Interpreter[TracedValue]):
    """The execution of a traced program, with the origin of each value that is not finite.

    Loops run turn by turn, and of a cond the selected branch.
    """

    enters = PROGRAMS - {"shard_map", "custom_partitioning"}

    def __init__(self, program: Any, inputs: Sequence[Any]):
        self._numbers = itertools.count()
        self._turn: tuple[int, ...] = ()
        self._broken: dict[int, _Broken] = {}
        self._inputs = inputs
        for number, array in enumerate(inputs):
            if (values := _nonfinite_values(array)) is not None:
                self._broken[number] = _Broken(bool(np.isnan(values).any()), (), None)
        self.outputs = self.run(program, [self._number(x) for x in inputs])

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

    def _number(self, array: Any) -> TracedValue:
        return TracedValue(array, next(self._numbers))

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

    def _made(
        self, equation: Equation, inputs: Sequence[TracedValue], arrays: Sequence[Any]
    ) -> list[TracedValue]:
        """Number the outputs of an operation, and record those that are not finite."""
        outputs = [self._number(array) for array in arrays]
        for output in outputs:
            values = _nonfinite_values(output.array)
            if values is None:
                continue
            sources = _source_inputs(equation, inputs, values)
            parents = [value.number for value in sources if value.number in self._broken]
            nan = bool(np.isnan(values).any())
            origin = None
            if not any(self._nan(n) or not nan for n in parents):  # made here
                extent = _extent(values)
                what = _describe_operation(equation, inputs, values, extent["place"])
                around = {"turn": self._turn, "calls": self.calls}
                origin = NonfiniteOrigin(what, **extent, equation=equation, **around)
            self._broken[output.number] = _Broken(nan, parents, origin)
        return outputs


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


def _extent(values: np.ndarray) -> dict[str, Any]:
    """Return place, count, shape and dtype of the NaNs, or of the infinities if there is none."""
    nonfinite = np.isnan(values) if np.isnan(values).any() else ~np.isfinite(values)
    return {
        "place": tuple(np.argwhere(nonfinite)[0].tolist()),
        "count": int(nonfinite.sum()),
        "shape": values.shape,
        "dtype": str(values.dtype),
    }


def _format(x: Any) -> str:
    return f"{float(x):.6g}" if jnp.issubdtype(x.dtype, jnp.floating) else str(x)


def _format_range(x: np.ndarray) -> str:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        return f"{x.dtype}{list(x.shape)}"
    finite = x[np.isfinite(x)].astype(np.float64)
    low_high = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else "none finite"
    return f"{x.dtype}{list(x.shape)} of {low_high}"
