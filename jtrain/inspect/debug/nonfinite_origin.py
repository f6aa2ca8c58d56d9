"""Finds the operation in a program that made a value which is not finite."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.inspect.debug.eval_jaxpr import Equation, ExecutedOp, TracedValue, execute


@dataclasses.dataclass(frozen=True)
class NonfiniteOp:
    """A value that is not finite, made from values that are (or a NaN, made from none)."""

    equation: Equation
    turn: tuple[int, ...]
    """Of each loop around it the turn, from 0."""
    calls: tuple[Equation, ...]
    """Of jitted functions around it."""
    what: str
    """`log(0.0) = -inf`."""
    place: tuple[int, ...]
    """The first element that is not finite."""
    count: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def primitive(self) -> str:
        """Its name."""
        return self.equation.primitive.name


@dataclasses.dataclass(frozen=True)
class NonfiniteInput:
    """An input of the program that was not finite from the beginning."""

    index: int
    place: tuple[int, ...]
    value: float
    count: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Broken:
    """What is remembered of a value that is not finite."""

    nan: bool
    parents: Sequence[int]  # the values that are not finite and that it was made of
    birth: NonfiniteOp | None


class NonfiniteTrace:
    """The execution of a program, and of each value that is not finite where it comes from."""

    def __init__(self, program: Any, inputs: Sequence[Any]):
        self._broken: dict[int, _Broken] = {}
        self._given = inputs
        for number, array in enumerate(inputs):
            if (bad := _not_finite(array)) is not None:
                self._broken[number] = _Broken(bool(np.isnan(bad).any()), (), None)
        for done in execute(program, inputs):
            if isinstance(done, list):
                self.outputs: list[TracedValue] = done
            else:
                self._look(done)

    def broken(self, value: TracedValue) -> bool:
        """Whether a value that the program gave is not finite."""
        return value.number in self._broken or _not_finite(value.array) is not None

    def origins(self, value: TracedValue) -> list[NonfiniteOp | NonfiniteInput]:
        """Where a value that is not finite comes from, the earliest first.

        Two where an infinity made a NaN: what made the infinity, and what made the NaN.
        """
        found: list[NonfiniteOp | NonfiniteInput] = []
        number, nan = value.number, self._nan(value.number)
        while number in self._broken:
            broken = self._broken[number]
            causes = [n for n in broken.parents if self._nan(n) or not nan]
            if not causes and broken.birth is not None:
                found.append(broken.birth)
                causes, nan = list(broken.parents), False  # of the infinity that it was made from
            if not causes:
                if number < len(self._given):
                    found.append(_given(number, self._given[number]))
                break
            number = min(causes)
        return found[::-1]

    def _nan(self, number: int) -> bool:
        return number in self._broken and self._broken[number].nan

    def _look(self, done: ExecutedOp) -> None:
        for output in done.outputs:
            bad = _not_finite(output.array)
            if bad is None:
                continue
            parents = [v.number for v in _taken(done, bad) if v.number in self._broken]
            nan = bool(np.isnan(bad).any())
            made = not any(self._nan(n) or not nan for n in parents)
            birth = _birth(done, output, bad) if made else None
            self._broken[output.number] = _Broken(nan, parents, birth)


def _not_finite(x: Any) -> np.ndarray | None:
    """`x` on the host if any of it is NaN or infinite."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return None
    host = np.asarray(x)
    return None if np.isfinite(host).all() else host


def _taken(done: ExecutedOp, bad: np.ndarray) -> Sequence[TracedValue]:
    """The inputs that the elements which are not finite were made of."""
    if done.equation.primitive.name != "select_n":
        return done.inputs
    which = np.broadcast_to(np.asarray(done.inputs[0].array), bad.shape)[~np.isfinite(bad)]
    return [done.inputs[1 + int(i)] for i in np.unique(which)]


def _birth(done: ExecutedOp, output: TracedValue, bad: np.ndarray) -> NonfiniteOp:
    wrong = ~np.isfinite(bad)
    if np.isnan(bad).any():
        wrong = np.isnan(bad)
    place = tuple(np.argwhere(wrong)[0].tolist())
    arrays = [value.array for value in done.inputs if not _is_key(value.array)]
    alike = all(jnp.shape(x) in {(), bad.shape} for x in arrays)
    if alike:  # element by element
        known = [_shown(np.asarray(x)[place] if jnp.shape(x) else np.asarray(x)) for x in arrays]
    else:
        known = [_range(np.asarray(x)) for x in arrays]
    return NonfiniteOp(
        equation=done.equation,
        turn=done.turn,
        calls=done.calls,
        what=f"{done.equation.primitive.name}({', '.join(known)}) = {_shown(bad[place])}",
        place=place,
        count=int(wrong.sum()),
        shape=bad.shape,
        dtype=str(bad.dtype),
    )


def _given(index: int, array: Any) -> NonfiniteInput:
    host = np.asarray(array)
    wrong = ~np.isfinite(host)
    place = tuple(np.argwhere(wrong)[0].tolist())
    return NonfiniteInput(index, place, float(host[place]), int(wrong.sum()), host.shape)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _shown(x: Any) -> str:
    return f"{float(x):.6g}" if jnp.issubdtype(x.dtype, jnp.floating) else str(x)


def _range(x: np.ndarray) -> str:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        return f"{x.dtype}{list(x.shape)}"
    finite = x[np.isfinite(x)].astype(np.float64)
    low_high = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else "none finite"
    return f"{x.dtype}{list(x.shape)} of {low_high}"
