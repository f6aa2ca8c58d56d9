"""The origin of nonfinite values in a traced program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.inspect.debug.eval_jaxpr import Equation, ExecutedOp, TracedValue, execute


@dataclasses.dataclass(frozen=True)
class NonfiniteOp:
    """An operation that made an infinity from finite inputs, or a NaN from inputs without NaN."""

    equation: Equation
    turn: tuple[int, ...]
    """Turn of each loop around it, from 0."""
    calls: tuple[Equation, ...]
    """Calls of jitted functions around it."""
    what: str
    """`log(0.0) = -inf`."""
    place: tuple[int, ...]
    """Index of the first nonfinite element."""
    count: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.equation.primitive.name


@dataclasses.dataclass(frozen=True)
class NonfiniteInput:
    """A nonfinite input of the program."""

    index: int
    place: tuple[int, ...]
    value: float
    count: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Broken:
    """The record of a nonfinite value."""

    nan: bool
    parents: Sequence[int]  # numbers of the nonfinite values that it was computed from
    origin: NonfiniteOp | None


class NonfiniteTrace:
    """The execution of a program, with the origin of each nonfinite value."""

    def __init__(self, program: Any, inputs: Sequence[Any]):
        self._broken: dict[int, _Broken] = {}
        self._inputs = inputs
        for number, array in enumerate(inputs):
            if (values := _nonfinite_values(array)) is not None:
                self._broken[number] = _Broken(bool(np.isnan(values).any()), (), None)
        for executed in execute(program, inputs):
            if isinstance(executed, list):
                self.outputs: list[TracedValue] = executed
            else:
                self._record(executed)

    def broken(self, value: TracedValue) -> bool:
        """Return whether an output of the program is not finite."""
        return value.number in self._broken or _nonfinite_values(value.array) is not None

    def origins(self, value: TracedValue) -> list[NonfiniteOp | NonfiniteInput]:
        """Return the origins of a nonfinite value, earliest first.

        An infinity that became a NaN has two origins: that of the infinity, and that of the NaN.
        """
        found: list[NonfiniteOp | NonfiniteInput] = []
        number, nan = value.number, self._nan(value.number)
        while number in self._broken:
            broken = self._broken[number]
            causes = [n for n in broken.parents if self._nan(n) or not nan]
            if not causes and broken.origin is not None:
                found.append(broken.origin)
                causes, nan = list(broken.parents), False  # continue with the infinity
            if not causes:
                if number < len(self._inputs):
                    found.append(_nonfinite_input(number, self._inputs[number]))
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
            origin = _nonfinite_op(executed, output, values) if created else None
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
    selected = np.broadcast_to(np.asarray(executed.inputs[0].array), values.shape)[
        ~np.isfinite(values)
    ]
    return [executed.inputs[1 + int(i)] for i in np.unique(selected)]


def _nonfinite_op(executed: ExecutedOp, output: TracedValue, values: np.ndarray) -> NonfiniteOp:
    nonfinite = ~np.isfinite(values)
    if np.isnan(values).any():
        nonfinite = np.isnan(values)
    place = tuple(np.argwhere(nonfinite)[0].tolist())
    arrays = [value.array for value in executed.inputs if not _is_key(value.array)]
    elementwise = all(jnp.shape(x) in {(), values.shape} for x in arrays)
    if elementwise:
        arguments = [
            _format(np.asarray(x)[place] if jnp.shape(x) else np.asarray(x)) for x in arrays
        ]
    else:
        arguments = [_format_range(np.asarray(x)) for x in arrays]
    primitive = executed.equation.primitive.name
    return NonfiniteOp(
        equation=executed.equation,
        turn=executed.turn,
        calls=executed.calls,
        what=f"{primitive}({', '.join(arguments)}) = {_format(values[place])}",
        place=place,
        count=int(nonfinite.sum()),
        shape=values.shape,
        dtype=str(values.dtype),
    )


def _nonfinite_input(index: int, array: Any) -> NonfiniteInput:
    host = np.asarray(array)
    nonfinite = ~np.isfinite(host)
    place = tuple(np.argwhere(nonfinite)[0].tolist())
    return NonfiniteInput(index, place, float(host[place]), int(nonfinite.sum()), host.shape)


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
