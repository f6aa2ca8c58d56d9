"""A traced loss in which values a row are broadcast, so that each row meets every other.

`prediction - target` of shapes (b, 1) and (b,) has the shape (b, b). NumPy's rules make it so
without a word, and the mean over it is another loss.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jtrain.core.jaxpr import called_jaxpr, open_jaxpr
from jtrain.errors import CodeError, LossError

Shape: TypeAlias = tuple[int, ...]
_BY_ELEMENT = {
    *("add", "and", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "or"),
    *("pow", "rem", "select_n", "sub", "xor"),
}


class BroadcastPair(NamedTuple):
    """A column and a row of numbers, one for each row of the batch, that are broadcast."""

    operation: str
    column: Shape
    row: Shape
    by_chance: bool
    """Whether the operation itself put dims in front of the row: no `y[None]` is written."""


def check_broadcasts(program: Any, trace: Callable[[int], Any], rows: int) -> None:
    """Check that no array of shape (b, 1) meets one of shape (b,) by chance.

    Pairs of rows that are meant are written `x[:, None] - y` or `x - y[None]`, and are let through.

    Args:
        program: the loss, traced.
        trace: a number of rows -> the same for a batch of so many, its calls not inlined; used
            where the program has a pair.
        rows: of the batch.

    Raises:
        LossError: with the operation and both shapes.
    """
    if rows < 2 or not any(pairs(program, rows)):
        return
    found = [pair for pair in pairs(trace(rows), rows) if pair.by_chance]
    try:
        grown = {pair[:3] for pair in pairs(trace(2 * rows), 2 * rows)}
    except (CodeError, TypeError, ValueError):  # a loss for batches of one size
        grown = None
    for operation, column, row, _ in found:
        # A dim of rows grows with the batch; another one of the same size does not.
        if grown is None or (operation, _twice(column, rows), _twice(row, rows)) in grown:
            raise LossError(
                f"`{operation}` takes arrays of shapes {column} and {row} element by element, of "
                f"{rows} rows: NumPy's rules make ({rows}, {rows}) of them, a number for each pair "
                f"of rows. Give both one shape: `x[:, 0]` for the first, or `y[:, None]` for the "
                f"second. If every pair is meant, write `y[None]`."
            )


def pairs(program: Any, rows: int) -> Iterator[BroadcastPair]:
    """Give the operations of a program in which a column of rows meets a row of rows.

    A column that the program makes of a row by `x[:, None]` is one that is meant.
    """
    jaxpr, _ = open_jaxpr(program)
    yield from _Walk(rows).run(jaxpr, [None] * len(jaxpr.invars))


def _twice(shape: Shape, rows: int) -> Shape:
    return tuple(2 * size if size == rows else size for size in shape)


class _Array(NamedTuple):
    """An array before it was broadcast."""

    shape: Shape
    dims: tuple[int, ...]
    """Where its dims stand in what it was broadcast to."""
    column: bool = False
    """Whether the program put a dim of size 1 behind others: `x[:, None]`."""
    made: Any = None
    """The place of the code that broadcast it."""

    def of_size(self, size: int) -> set[int]:
        """The dims of what it was broadcast to that are of a size by themselves."""
        return {at for at, n in zip(self.dims, self.shape, strict=True) if n == size}


class _Walk:
    def __init__(self, rows: int):
        self._rows = rows
        self._outputs: list[_Array] = []

    def run(
        self, jaxpr: Any, inputs: Sequence[_Array | None], call: Any = None
    ) -> Iterator[BroadcastPair]:
        """Walks along the equations of a program."""
        known = {x: y for x, y in zip(jaxpr.invars, inputs, strict=True) if y is not None}

        def read(atom: Any) -> _Array:
            shape = tuple(atom.aval.shape)
            plain = _Array(shape, tuple(range(len(shape))))
            return plain if hasattr(atom, "val") else known.get(atom, plain)

        for equation in jaxpr.eqns:
            given = [read(x) for x in equation.invars]
            if (program := called_jaxpr(equation)) is not None:
                yield from self.run(open_jaxpr(program)[0], given, equation)
                known.update(zip(equation.outvars, self._outputs, strict=True))
                continue
            yield from self._met(equation, given, call)
            if (made := _made(equation, given)) is not None:
                known[equation.outvars[0]] = made
        self._outputs = [read(x) for x in jaxpr.outvars]

    def _met(self, equation: Any, given: Sequence[_Array], call: Any) -> Iterator[BroadcastPair]:
        if equation.primitive.name not in _BY_ELEMENT:
            return
        for one, other in itertools.permutations([x for x in given if x.shape], 2):
            down, along = one.of_size(self._rows), other.of_size(self._rows)
            apart = any(i < j for i in down - along for j in along - down)
            if apart and not one.column and len(other.shape) < len(one.shape):
                # All that one call of jax.numpy does has its place; jnp.where keeps a program.
                places = [_place(equation), call and _place(call)]
                by_chance = other.made is not None and other.made in places
                by_chance |= bool(call and call.params.get("name") == "_where")
                yield BroadcastPair(equation.primitive.name, one.shape, other.shape, by_chance)


def _made(equation: Any, given: Sequence[_Array]) -> _Array | None:
    """What an operation makes; None for an array that is no other one broadcast."""
    name, after = equation.primitive.name, tuple(equation.outvars[0].aval.shape)
    whole = _Array(after, tuple(range(len(after))))
    if name in _BY_ELEMENT:
        wide = [x for x in given if x.shape]
        return whole._replace(column=bool(wide) and all(x.column for x in wide))
    if not given or not given[0].shape:
        return None
    before = tuple(equation.invars[0].aval.shape)
    if name in {"broadcast_in_dim", "reshape"}:
        dims = equation.params.get("broadcast_dimensions") or _kept(before, after)
        if dims is None:
            return None
        if tuple(dims) != tuple(range(len(after) - len(dims), len(after))):
            return whole._replace(column=True)
        moved = tuple(dims[at] for at in given[0].dims)
        return given[0]._replace(dims=moved, made=_place(equation))
    return given[0] if len(given) == 1 and after == before else None


def _place(equation: Any) -> Any:
    """The place in the code that an equation was traced at."""
    return getattr(getattr(equation, "source_info", None), "traceback", None)


def _kept(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """Where the dims of an array stand after dims of size 1 were put in; None if it is reshaped."""
    dims, place = [], 0
    for size in before:
        while place < len(after) and after[place] != size and after[place] == 1:
            place += 1
        if place == len(after) or after[place] != size:
            return None
        dims.append(place)
        place += 1
    return tuple(dims) if all(n == 1 for n in after[place:]) else None
