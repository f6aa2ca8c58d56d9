"""Check for accidental broadcasts in a traced loss, which pair each row with every other.

`prediction - target` of shapes (b, 1) and (b,) silently has the shape (b, b) by NumPy's rules, and
the mean over it is another loss.
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
        program: the traced loss.
        trace: `rows -> program` for a batch of this many rows, without inlined calls; used if the
            program has a pair.
        rows: of the batch.

    Raises:
        LossError: with the operation and both shapes.
    """
    if rows < 2 or not any(find_pairs(program, rows)):
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


def find_pairs(program: Any, rows: int) -> Iterator[BroadcastPair]:
    """Yield the operations of a program that broadcast a column of rows against a row of rows.

    A column that the program made by `x[:, None]` is intended, and not included.
    """
    jaxpr, _ = open_jaxpr(program)
    yield from _BroadcastWalk(rows).run(jaxpr, [None] * len(jaxpr.invars))


def _twice(shape: Shape, rows: int) -> Shape:
    return tuple(2 * size if size == rows else size for size in shape)


class _Array(NamedTuple):
    """Array before a broadcast."""

    shape: Shape
    dims: tuple[int, ...]
    """Positions of its dims in the broadcast array."""
    column: bool = False
    """True if the program appended a dim of size 1: `x[:, None]`."""
    source: Any = None
    """Source location of the broadcast."""

    def of_size(self, size: int) -> set[int]:
        """Return the positions of its own dims of a size in the broadcast array."""
        return {at for at, n in zip(self.dims, self.shape, strict=True) if n == size}


class _BroadcastWalk:
    def __init__(self, rows: int):
        self._rows = rows
        self._outputs: list[_Array] = []

    def run(
        self, jaxpr: Any, inputs: Sequence[_Array | None], call: Any = None
    ) -> Iterator[BroadcastPair]:
        """Walk the equations of a program and yield its pairs."""
        known = {x: y for x, y in zip(jaxpr.invars, inputs, strict=True) if y is not None}

        def read(atom: Any) -> _Array:
            shape = tuple(atom.aval.shape)
            plain = _Array(shape, tuple(range(len(shape))))
            return plain if hasattr(atom, "val") else known.get(atom, plain)

        for equation in jaxpr.eqns:
            arguments = [read(x) for x in equation.invars]
            if (program := called_jaxpr(equation)) is not None:
                yield from self.run(open_jaxpr(program)[0], arguments, equation)
                known.update(zip(equation.outvars, self._outputs, strict=True))
                continue
            yield from self._pairs(equation, arguments, call)
            if (output := _output(equation, arguments)) is not None:
                known[equation.outvars[0]] = output
        self._outputs = [read(x) for x in jaxpr.outvars]

    def _pairs(self, equation: Any, inputs: Sequence[_Array], call: Any) -> Iterator[BroadcastPair]:
        if equation.primitive.name not in _BY_ELEMENT:
            return
        for one, other in itertools.permutations([x for x in inputs if x.shape], 2):
            down, along = one.of_size(self._rows), other.of_size(self._rows)
            crossed = any(i < j for i in down - along for j in along - down)
            if crossed and not one.column and len(other.shape) < len(one.shape):
                # All equations of one jax.numpy call share a location; jnp.where is a call.
                sources = [_source(equation), call and _source(call)]
                by_chance = other.source is not None and other.source in sources
                by_chance |= bool(call and call.params.get("name") == "_where")
                yield BroadcastPair(equation.primitive.name, one.shape, other.shape, by_chance)


def _output(equation: Any, inputs: Sequence[_Array]) -> _Array | None:
    """Return the output of an operation; None for an array that is no broadcast of another."""
    name, after = equation.primitive.name, tuple(equation.outvars[0].aval.shape)
    plain = _Array(after, tuple(range(len(after))))
    if name in _BY_ELEMENT:
        arrays = [x for x in inputs if x.shape]
        return plain._replace(column=bool(arrays) and all(x.column for x in arrays))
    if not inputs or not inputs[0].shape:
        return None
    before = tuple(equation.invars[0].aval.shape)
    if name in {"broadcast_in_dim", "reshape"}:
        dims = equation.params.get("broadcast_dimensions") or _positions(before, after)
        if dims is None:
            return None
        if tuple(dims) != tuple(range(len(after) - len(dims), len(after))):
            return plain._replace(column=True)
        positions = tuple(dims[i] for i in inputs[0].dims)
        return inputs[0]._replace(dims=positions, source=_source(equation))
    return inputs[0] if len(inputs) == 1 and after == before else None


def _source(equation: Any) -> Any:
    """Return the source location at which an equation was traced."""
    return getattr(getattr(equation, "source_info", None), "traceback", None)


def _positions(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """Return the positions of dims after dims of size 1 were inserted; None for other reshapes."""
    dims, i = [], 0
    for size in before:
        while i < len(after) and after[i] != size and after[i] == 1:
            i += 1
        if i == len(after) or after[i] != size:
            return None
        dims.append(i)
        i += 1
    return tuple(dims) if all(n == 1 for n in after[i:]) else None
