"""Check for accidental broadcasts in a traced loss, which pair each row with every other.

`prediction - target` of shapes (b, 1) and (b,) silently has the shape (b, b) by NumPy's rules, and
the mean over it is another loss.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jtrain.core.interpret import CALLS, Equation, Interpreter
from jtrain.errors import CodeError, LossError

Shape: TypeAlias = tuple[int, ...]
_BY_ELEMENT = {
    *("add", "and", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "or"),
    *("pow", "rem", "select_n", "sub", "xor"),
}


class BroadcastPair(NamedTuple):
    """Broadcast of a column (b, 1) against a row (b,), each with a number for each batch row."""

    operation: str
    column: Shape
    row: Shape
    by_chance: bool
    """True if the operation itself added the row's leading dims: `y[None]` is not written."""


def check_broadcasts(program: Any, trace: Callable[[int], Any], rows: int) -> None:
    """Raise if an array of shape (b, 1) is broadcast against one of shape (b,) by accident.

    Intended pairs of rows are written `x[:, None] - y` or `x - y[None]`, and are accepted.

    Args:
        trace: `rows -> program` for a batch of this many rows, without inlined calls; used if the
            program has a pair.

    Raises:
        LossError: with the operation and both shapes.
    """
    if rows < 2 or not find_pairs(program, rows):
        return
    found = [pair for pair in find_pairs(trace(rows), rows) if pair.by_chance]
    try:
        grown = {pair[:3] for pair in find_pairs(trace(2 * rows), 2 * rows)}
    except (CodeError, TypeError, ValueError):  # a loss for batches of one size
        grown = None
    for operation, column, row, _ in found:
        # A dim of rows grows with the batch; another dim of the same size does not.
        if grown is None or (operation, _twice(column, rows), _twice(row, rows)) in grown:
            raise LossError(
                f"`{operation}` takes arrays of shapes {column} and {row} element by element, of "
                f"{rows} rows: NumPy's rules make ({rows}, {rows}) of them, a number for each pair "
                f"of rows. Give both the same shape: `x[:, 0]` for the first, or `y[:, None]` for "
                f"the second. If every pair is intended, write `y[None]`."
            )


def find_pairs(program: Any, rows: int) -> list[BroadcastPair]:
    """Return the operations of a program that broadcast a column of rows against a row of rows.

    A column that the program made by `x[:, None]` is intended, and not included.
    """
    walk = _Broadcasts(rows)
    walk.run(program, [_Array(aval.shape) for aval in program.in_avals])
    return walk.pairs


def _twice(shape: Shape, rows: int) -> Shape:
    return tuple(2 * size if size == rows else size for size in shape)


class _Array(NamedTuple):
    """Array before NumPy's rules broadcast it: to its dims they add others on the left."""

    shape: Shape
    column: bool = False
    """True if the program itself appended a dim of size 1: `x[:, None]`."""
    source: Any = None

    def of_size(self, size: int) -> set[int]:
        """Return the positions, from the right, of the dims of a size."""
        return {at for at, n in enumerate(self.shape[::-1]) if n == size}


class _Broadcasts(Interpreter[_Array]):
    enters = CALLS

    def __init__(self, rows: int):
        self._rows = rows
        self.pairs: list[BroadcastPair] = []

    def constant(self, value: Any, aval: Any) -> _Array:
        return _Array(aval.shape)

    def operation(self, equation: Equation, inputs: list[_Array]) -> Sequence[_Array]:
        name, after = equation.primitive.name, equation.outvars[0].aval.shape
        if name in _BY_ELEMENT:
            arrays = [x for x in inputs if x.shape]
            self._find_pairs(equation, arrays)
            return [_Array(after, bool(arrays) and all(x.column for x in arrays))]
        plain = [_Array(x.aval.shape) for x in equation.outvars]
        if not inputs or not inputs[0].shape:
            return plain
        before = equation.invars[0].aval.shape
        if name in {"broadcast_in_dim", "reshape"}:
            first = len(after) - len(before)
            own = equation.params.get("broadcast_dimensions", range(first, len(after)))
            if tuple(own) == tuple(range(first, len(after))) and _fits(before, after[first:]):
                return [inputs[0]._replace(source=_source(equation))]
            # A reshape that only inserts dims of size 1 has inserted one on the right.
            sizes = [[n for n in shape if n != 1] for shape in (before, after)]
            inserted = first > 0 and sizes[0] == sizes[1]
            return [_Array(after, column=inserted or name == "broadcast_in_dim")]
        return inputs if len(inputs) == len(plain) and after == before else plain

    def _find_pairs(self, equation: Equation, arrays: list[_Array]) -> None:
        call = self.calls[-1] if self.calls else None
        for one, other in itertools.permutations(arrays, 2):
            down, along = one.of_size(self._rows), other.of_size(self._rows)
            crossed = any(i > j for i in down - along for j in along - down)
            if crossed and not one.column and len(other.shape) < len(one.shape):
                # All equations of one jax.numpy call share a location; jnp.where is a call.
                sources = [_source(equation), call and _source(call)]
                by_chance = other.source is not None and other.source in sources
                by_chance |= bool(call and call.params.get("name") == "_where")
                name = equation.primitive.name
                self.pairs.append(BroadcastPair(name, one.shape, other.shape, by_chance))


def _fits(before: Shape, after: Shape) -> bool:
    """Return whether NumPy's rules make these dims of those, of as many."""
    return len(before) == len(after) and all(
        n in (1, m) for n, m in zip(before, after, strict=True)
    )


def _source(equation: Equation) -> Any:
    return getattr(getattr(equation, "source_info", None), "traceback", None)
