"""Where in a loss rows meet, seen from its trace for two sizes of the batch. Nothing is run."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.debug.source import written
from jtrain.jaxprs import inner
from jtrain.terms import in_terms
from jtrain.testing.splits import taken
from jtrain.testing.subject import Subject
from jtrain.types import Batch

# They give each element a place among the others of a dim.
RANKS = {"sort", "top_k", "approx_top_k", "argmax", "argmin", "cumsum", "cummax", "cummin"}


class Meeting(NamedTuple):
    """An operation over rows whose result goes back to rows."""

    operation: str
    ranks: bool
    line: str  # `losses.py:12`; empty where it is not known

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.operation} over rows{f' at {self.line}' if self.line else ''}"


def where_rows_meet(of: Subject) -> Meeting | None:
    """The first operation by which rows meet; None where none is seen.

    A dim that grows with the batch is one of rows. Rows meet where such a dim is ranked, where two
    of them are paired, and where what was reduced over one goes on to an array that has one.
    """
    sizes = of.rows, of.rows // 2
    traces = [_trace(of, taken(of.batch, np.arange(size))) for size in sizes]
    try:
        return _Walk().first(*traces)
    except _DifferentError:
        return None


class _DifferentError(Exception):
    """The two traces are not the same program."""


def _trace(of: Subject, batch: Batch) -> Any:
    # Without its jit, which is inlined where it is called, and with it the lines of the loss.
    terms = inspect.unwrap(in_terms(of.alone(), ragged=not of.masks))

    def totals(params: Any, extra: Any, batch: Any) -> Any:
        return [mean.total for mean in terms(params, extra, batch, None).terms.means]

    return jax.make_jaxpr(totals)(of.params, of.extra, batch).jaxpr


class _Walk:
    def first(self, large: Any, small: Any) -> Meeting | None:
        """The first meeting in two traces of one program."""
        return self._program(large, small, {})

    def _program(self, large: Any, small: Any, mixed: dict[Any, Meeting]) -> Meeting | None:
        """Walks along both; `mixed`: what was reduced over rows, and where."""
        if len(large.eqns) != len(small.eqns):
            raise _DifferentError
        for one, other in zip(large.eqns, small.eqns, strict=True):
            if one.primitive.name != other.primitive.name:
                raise _DifferentError
            if found := self._equation(one, other, mixed):
                return found
        return None

    def _equation(self, one: Any, other: Any, mixed: dict[Any, Meeting]) -> Meeting | None:
        into, out = _row_dims(one.invars, other.invars), _row_dims(one.outvars, other.outvars)
        before = [mixed[x] for x in one.invars if not hasattr(x, "val") and x in mixed]
        programs = list(zip(inner(one), inner(other), strict=True))
        if programs and one.primitive.name != "scatter-add":
            for large, small in programs:
                if len(large.invars) == len(one.invars):
                    pairs = zip(large.invars, one.invars, strict=True)
                    known = {a: mixed[b] for a, b in pairs if not hasattr(b, "val") and b in mixed}
                    if found := self._program(large, small, known):
                        return found
                    ends = zip(one.outvars, large.outvars, strict=False)
                    mixed |= {a: known[b] for a, b in ends if not hasattr(b, "val") and b in known}
            return None
        if before and any(out):
            return before[0]
        here = Meeting(one.primitive.name, one.primitive.name in RANKS, _line(one))
        if here.ranks and self._along_rows(one, into):
            return here
        if sum(map(bool, into)) > 1 and any(len(dims) > 1 for dims in out):
            return here
        if any(into) and not any(out):
            mixed |= {x: here for x in one.outvars}
        elif before:
            mixed |= {x: before[0] for x in one.outvars}
        return None

    def _along_rows(self, equation: Any, into: Sequence[set[int]]) -> bool:
        params = equation.params
        if equation.primitive.name in {"top_k", "approx_top_k"}:
            along = {len(equation.invars[0].aval.shape) - 1}
        elif "axes" in params:
            along = set(params["axes"])
        else:
            along = {params.get("dimension", params.get("axis", 0))}
        return any(along & dims for dims in into)


def _row_dims(large: Sequence[Any], small: Sequence[Any]) -> list[set[int]]:
    """Of each array the dims that differ."""

    def dims(a: Any, b: Any) -> set[int]:
        shapes = zip(a.aval.shape, b.aval.shape, strict=False)
        return {i for i, (x, y) in enumerate(shapes) if x != y}

    return [dims(a, b) for a, b in zip(large, small, strict=True)]


def _line(equation: Any) -> str:
    """Of the innermost call that is in no library; empty where none is known."""
    lines = written(equation)
    return f"{Path(lines[-1].file).name}:{lines[-1].line}" if lines else ""
