"""Whole numbers of a batch that a loss indexes an array by, read off its trace."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.jaxprs import inner
from jtrain.testing.where import Where
from jtrain.testing.widened import CALLS

# They put the numbers of an array elsewhere, and change none.
SAME = {
    *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "copy"),
    *("dynamic_slice", "gather", "rev", "convert_element_type", "stop_gradient", "split"),
    *("optimization_barrier", "sharding_constraint", "reduce_precision"),
}
LIMITS = {"clamp", "max", "min"}


class Index(NamedTuple):
    """A leaf of the batch that picks one of `size` places."""

    leaf: str
    size: int
    less: int
    """What is added to the leaf before."""
    line: str

    def outside(self, numbers: np.ndarray) -> np.ndarray:
        """Return where numbers of the leaf pick no place: bool, of their shape."""
        return (numbers + self.less < 0) | (numbers + self.less >= self.size)


class _Value(NamedTuple):
    """What is known of a value of a traced program."""

    leaf: str = ""  # the leaf of the batch whose whole numbers it holds
    added: int = 0  # ... and what was added to them
    wrapped: Any = None  # the value before the size was added to what is negative
    counts: int = 0  # it holds 0 .. counts - 1 along a dim
    columns: tuple["_Value", ...] = ()  # what is known of each place of its last dim
    varies: bool = False  # it was computed from the batch


UNKNOWN = _Value()


def indices(program: Any, leaves: Sequence[str | None]) -> list[Index]:
    """Return all leaves by which a traced program indexes an array, each once.

    A clip that a loss writes is meant: what went through one is left out. One inside of jtrain only
    keeps an index inside of its array, and is looked through.

    Args:
        program: of `jax.make_jaxpr`.
        leaves: of each input, the name of the leaf of the batch that it is; None for others.
    """
    walk = _Walk()
    walk.program(program, [UNKNOWN if n is None else _Value(n, varies=True) for n in leaves])
    return list(dict.fromkeys(walk.found))


class _Walk:
    def __init__(self) -> None:
        self.found: list[Index] = []
        self._where = Where()

    def program(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """What is known of the outputs."""
        jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        known = dict(zip(jaxpr.constvars, map(_constant, constants), strict=False))
        known |= zip(jaxpr.invars, inputs, strict=True)

        def read(atom: Any) -> _Value:
            return UNKNOWN if hasattr(atom, "val") else known.get(atom, UNKNOWN)

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            known |= zip(equation.outvars, self._equation(equation, given), strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, given: list[_Value]) -> Sequence[_Value]:
        name, programs = equation.primitive.name, inner(equation)
        varies = any(value.varies for value in given)
        unknown = [UNKNOWN._replace(varies=varies)] * len(equation.outvars)
        if name in CALLS and programs and len(programs[0].invars) == len(given):
            with self._where.inside(equation):
                return self.program(programs[0], given)
        if name == "scan":
            return self._scan(equation, given) or unknown
        if programs and not name.startswith("scatter"):
            for one in programs:
                some = given[-len(one.invars) :] if one.invars else []
                self.program(one, [*some, *[UNKNOWN] * (len(one.invars) - len(some))])
            return unknown
        self._look(equation, given)
        value = self._primitive(equation, given)
        return unknown if value is None else [value._replace(varies=varies)] * len(unknown)

    def _scan(self, equation: Any, given: list[_Value]) -> list[_Value]:
        """What is carried is not followed: it may become anything."""
        body = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
        shapes = (
            [len(x.aval.shape) for x in body.invars],
            [len(x.aval.shape) for x in equation.invars],
        )
        outer = [len(x.aval.shape) for x in equation.outvars]
        carried = sum(
            a == b for a, b in zip(outer, [len(x.aval.shape) for x in body.outvars], strict=True)
        )
        before = sum(a == b for a, b in zip(*shapes, strict=True))
        inputs = list(given)
        for i in range(before - carried, before):
            inputs[i] = UNKNOWN._replace(varies=given[i].varies)
        self.program(body, inputs)
        return []

    def _primitive(self, equation: Any, given: list[_Value]) -> _Value | None:
        """What is known of a result; None if nothing."""
        name, first = equation.primitive.name, given[0] if given else UNKNOWN
        if name == "iota":
            return _Value(counts=equation.params["shape"][equation.params["dimension"]])
        if name in SAME:
            return first._replace(columns=first.columns if name == "copy" else ())
        if name in LIMITS and self._where.in_jtrain(equation):
            return next((value for value in given if value.leaf), None)
        if name in {"add", "sub"}:
            return _shifted(equation, given)
        if name == "select_n" and len(given) == 3:
            plain, other = given[1:]
            if other.wrapped is not None and other.wrapped == plain:
                return plain
            return (
                given[2] if given[1].wrapped is not None and given[1].wrapped == given[2] else None
            )
        if name == "concatenate":
            last = len(equation.outvars[0].aval.shape) - 1
            if equation.params["dimension"] == last:
                sizes = [x.aval.shape[-1] for x in equation.invars]
                columns = zip(given, sizes, strict=True)
                return _Value(columns=tuple(v for v, size in columns for _ in range(size)))
            return first if all(value == first for value in given) else None
        return None

    def _look(self, equation: Any, given: list[_Value]) -> None:
        """Notes an equation that picks by a leaf."""
        name = equation.primitive.name
        if name == "gather":
            shape = equation.invars[0].aval.shape
            dims = equation.params["dimension_numbers"].start_index_map
            sizes = equation.params["slice_sizes"]
            places = given[1].columns or (given[1],) * len(dims)
            for dim, place in zip(dims, places, strict=False):
                self._note(equation, place, shape[dim] - sizes[dim] + 1)
        if name == "dynamic_slice":
            shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
            for dim, place in enumerate(given[1:]):
                self._note(equation, place, shape[dim] - sizes[dim] + 1)
        if name == "eq":
            for place, other in (given, given[::-1]):
                if other.counts > 1:
                    self._note(equation, place, other.counts)

    def _note(self, equation: Any, place: _Value, size: int) -> None:
        if place.leaf and size > 1:
            line = self._where.line(equation)
            self.found.append(Index(place.leaf, size, place.added, line))


def _constant(x: Any) -> _Value:
    """A constant may be a row of numbers, as `np.arange` makes."""
    array = np.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.zeros(0)
    flat = array.ravel()
    counts = (
        array.dtype.kind in "iu" and flat.size > 1 and np.array_equal(flat, np.arange(flat.size))
    )
    return _Value(counts=flat.size if counts else 0)


def _shifted(equation: Any, given: list[_Value]) -> _Value | None:
    """A leaf with a constant added: an index that begins elsewhere, or one from the end."""
    name = equation.primitive.name
    literals = [getattr(atom, "val", None) for atom in equation.invars]
    for value, literal in ((given[0], literals[1]), (given[1], literals[0])):
        number = None if literal is None or np.size(literal) != 1 else literal
        if (
            number is None
            or np.asarray(number).dtype.kind not in "iu"
            or not (value.leaf or value.counts)
        ):
            continue
        if name == "sub" and value is given[1]:
            return None
        more = int(np.asarray(number)) * (1 if name == "add" else -1)
        return value._replace(added=value.added + more, wrapped=value, counts=0, columns=())
    return None


def outside(found: Sequence[Index], batch: Mapping[str, Any]) -> list[tuple[Index, np.ndarray]]:
    """Return the indexes that pick no place in rows that count.

    Beside each where it picks none: bool, of the shape of its leaf.
    """
    wrong = []
    for index in found:
        numbers = np.asarray(batch[index.leaf])
        counts = np.reshape(batch["mask"], (-1, *[1] * (numbers.ndim - 1)))
        where = index.outside(numbers) & counts
        if where.any():
            wrong.append((index, where))
    return wrong
