"""Index uses: integers of a batch that a traced loss uses as indices, and the valid range.

The trace is evaluated with the arrays of the batch known and everything else (parameters, state,
keys) unknown. Values that depend only on the batch stay known, so each index is known at its use,
and nothing of the model is computed.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jtrain.core.jaxpr import called_jaxpr, inner_jaxprs, open_jaxpr, scan_sizes
from jtrain.losses.shapes import DOMAIN, MARK

# Primitives that return their inputs.
_SAME = {"copy", "optimization_barrier", "sharding_constraint", "stop_gradient"}
# Primitives that move or cast numbers without changing them.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "pad", "reshape", "rev", "slice"),
    *("squeeze", "transpose"),
}
# Primitives that compute indices; the results of any other are unknown.
_COMPUTES = {
    *("abs", "add", "and", "clamp", "div", "eq", "floor", "ge", "gt", "iota", "le", "lt", "max"),
    *("min", "mul", "name", "ne", "neg", "not", "or", "rem", "round", "select_n", "sign", "sub"),
    *(
        "argmax",
        "argmin",
        "cummax",
        "cumsum",
        "dynamic_slice",
        "gather",
        "reduce_and",
        "reduce_max",
    ),
    *("reduce_min", "reduce_or", "reduce_sum", "xor"),
}
_BY_ELEMENT = {"add", "div", "mul", "select_n", "sub"}
Values: TypeAlias = "list[_Known | None]"  # None: unknown


class IndexUse(NamedTuple):
    """Use of integers of a batch as indices into a dim."""

    entries: int
    """Size of the dim: valid indices are 0 .. entries - 1."""
    leaves: frozenset[str]
    """Arrays of the batch that the integers are computed from."""
    shape: tuple[int, ...]
    """Shape of the indexed array."""
    moved: bool
    """True if the integers are the unchanged values of one array of the batch."""


class DomainUse(NamedTuple):
    """Use of values of a batch in a loss that is defined for some values only."""

    domain: str  # as `in_domain` takes it
    leaves: frozenset[str]  # arrays of the batch that the values are computed from


class IndexUses(NamedTuple):
    """Index uses of a traced function."""

    found: Sequence[IndexUse]
    outside: Callable[[Mapping[str, Any]], Sequence[Any]]
    """Function of `leaves` by name: the count of out-of-range integers of each use."""
    domains: Sequence["DomainUse"]
    marked: Callable[[Mapping[str, Any]], Sequence[Any]]
    """Function of the batch by name: the values of each of `domains`."""

    @property
    def leaves(self) -> frozenset[str]:
        """Arrays of the batch that some use is computed from."""
        return frozenset().union(*(use.leaves for use in self.found))


def find_uses(
    program: Any, batch: Mapping[str, Any], leaves: Sequence[str | None] | None = None
) -> IndexUses:
    """Return the index uses of a traced function of a batch. Nothing is run.

    - A gather, such as `logits[rows, labels]`, in an array that depends on `unknown`. With an
      explicit `mode="clip"` or `fill_value` other integers are intended, and it is no use.
    - A comparison with all classes (`jax.nn.one_hot`) that is combined, element by element, with an
      array that depends on `unknown`, if there is a softmax over as many classes. Otherwise a row
      of zeros may be intended.
    - Values marked by `in_range`; those marked by `in_domain` are in `domains`.

    A negative integer, which JAX counts from the end, is out of range here. The search enters jit,
    remat, custom derivatives and scan, but not `while_loop` and `cond`.

    Args:
        program: `jax.make_jaxpr(fn)(unknown, batch)`, where `unknown` is any pytree.
        batch: shapes by name.
        leaves: for each input of the program the name of its batch array, None if unknown; by
            default the arrays of the batch are the last inputs.
    """
    names, closed = sorted(batch), program
    if leaves is None:
        leaves = [None] * (len(closed.jaxpr.invars) - len(names)) + names
    softmaxes = set(_softmaxes(closed.jaxpr))
    found: list[IndexUse] = []
    domains: list[DomainUse] = []

    def walk_with(given: Mapping[str, Any]) -> _Walk:
        walk = _Walk()
        # Arrays that no index depends on may have any value; the compiler drops them.
        arrays = {
            name: given.get(name, jnp.zeros(batch[name].shape, batch[name].dtype)) for name in names
        }
        known = {n: _Known(x, frozenset([n]), moved=True) for n, x in arrays.items()}
        inputs = [None if name is None else known[name] for name in leaves]
        walk.run(closed.jaxpr, closed.consts, inputs)
        return walk

    def outside(given: Mapping[str, Any]) -> list[Array]:
        walk = walk_with(given)
        domains[:] = [use for use, _ in walk.domains]
        looks = [look for look in walk.looks if look.axis is None or look.entries in softmaxes]
        found[:] = [IndexUse(look.entries, look.leaves, look.shape, look.moved) for look in looks]
        return [jnp.sum((look.raw < 0) | (look.raw >= look.entries)) for look in looks]

    jax.eval_shape(outside, dict(batch))
    marked = jax.jit(lambda given: [values for _, values in walk_with(given).domains])
    return IndexUses(tuple(found), jax.jit(outside), tuple(domains), marked)


class _Look(NamedTuple):
    """Index use during the evaluation of the trace."""

    entries: int
    leaves: frozenset[str]
    shape: tuple[int, ...]
    raw: Any
    """Integers used as indices."""
    moved: bool = False
    axis: int | None = None
    """Dim of the classes, for a comparison with all classes."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """Array that depends on the batch only."""

    array: Any
    leaves: frozenset[str] = frozenset()
    """Arrays of the batch that it is computed from."""
    before: Any = None
    """The array before negative integers were wrapped; None if none were."""
    moved: bool = False
    """True if `raw` has the values of one array of the batch and no others."""
    of: "tuple[str, _Known] | None" = None
    """Operation and input that made it: `x < 0`, `x + number`."""
    counts: int | None = None
    """Dim along which it counts 0, 1, 2 ..., if it does."""
    one_hot: tuple[_Look, ...] = ()
    """Comparisons that it is computed from, element by element."""

    @property
    def raw(self) -> Any:
        """Integers before wrapping."""
        return self.array if self.before is None else self.before


class _Walk:
    def __init__(self) -> None:
        self.looks: list[_Look] = []
        self.domains: list[tuple[DomainUse, Any]] = []

    def run(self, program: Any, consts: Sequence[Any], inputs: Values) -> Values:
        """Evaluate the equations of a program; return its known outputs, None for unknown ones."""
        known: dict[Any, _Known] = {}

        def bind(variables: Sequence[Any], values: Values) -> None:
            pairs = zip(variables, values, strict=True)
            known.update((variable, value) for variable, value in pairs if value is not None)

        def read(atom: Any) -> _Known | None:
            return _Known(atom.val) if hasattr(atom, "val") else known.get(atom)

        bind(program.constvars, [_constant(const) for const in consts])
        bind(program.invars, inputs)
        for equation in program.eqns:
            bind(equation.outvars, self._equation(equation, [read(x) for x in equation.invars]))
        return [read(x) for x in program.outvars]

    def _equation(self, equation: Any, inputs: Values) -> Values:
        name = equation.primitive.name
        nothing: Values = [None] * len(equation.outvars)
        if inputs and not any(inputs):
            return nothing
        if (program := called_jaxpr(equation)) is not None:
            return self.run(*open_jaxpr(program), inputs)
        if name in _SAME:
            return inputs
        if name == "scan":
            return self._scan(equation, inputs)
        known = [x for x in inputs if x is not None]
        if len(known) == len(inputs):
            computed = name in _MOVES | _COMPUTES
            return self._computed(equation, known) if computed else nothing
        if inputs[0] is None:
            self._gather(equation, inputs)
        self._meet(equation, inputs)
        return nothing

    def _computed(self, equation: Any, inputs: list[_Known]) -> Values:
        """Return the outputs of an equation whose inputs are all known."""
        name, leaves = equation.primitive.name, frozenset().union(*(x.leaves for x in inputs))
        arrays = _run(equation, [x.array for x in inputs])
        if name == "name" and leaves and (mark := MARK.fullmatch(equation.params["name"])):
            shape = tuple(map(int, re.findall(r"\d+", mark[2])))
            self.looks.append(_Look(int(mark[1]), leaves, shape, inputs[0].raw, inputs[0].moved))
            return [_Known(arrays[0])]  # the marked values are looked up elsewhere
        if name == "name" and leaves and (mark := DOMAIN.fullmatch(equation.params["name"])):
            self.domains.append((DomainUse(mark[1], leaves), arrays[0]))
        if len(arrays) != 1:
            return [_Known(array, leaves) for array in arrays]
        made = _Known(arrays[0], leaves, counts=_counts(equation, inputs))
        if name in _MOVES:
            return [_moved(equation, inputs, made)]
        if name in {"lt", "add"} and not inputs[1].leaves:
            made = dataclasses.replace(made, of=(name, inputs[0]))
        if name == "select_n" and len(inputs) == 3:
            negative, index, wrapped = inputs
            if negative.of == ("lt", index) and wrapped.of == ("add", index):
                made = dataclasses.replace(made, before=index.raw, moved=index.moved)
        looks = _compared(inputs, made) if name == "eq" else ()
        return [dataclasses.replace(made, one_hot=(*looks, *_followed(inputs, made)))]

    def _gather(self, equation: Any, inputs: Values) -> None:
        """Record the integers that index an unknown array."""
        params, shape = equation.params, equation.invars[0].aval.shape
        if equation.primitive.name == "dynamic_slice":
            indices = dict(enumerate(inputs[1:]))
            chosen = {dim: (x, x.raw) for dim, x in indices.items() if x is not None}
        elif (
            equation.primitive.name == "gather"
            and inputs[1] is not None
            and not _handles_out_of_range(params)
        ):
            dims = params["dimension_numbers"].start_index_map
            chosen = {dim: (inputs[1], inputs[1].raw[..., i]) for i, dim in enumerate(dims)}
        else:
            return
        for dim, (index, raw) in chosen.items():
            if index.leaves and params["slice_sizes"][dim] == 1:  # the start of a window is clamped
                self.looks.append(_Look(shape[dim], index.leaves, shape, raw, index.moved))

    def _meet(self, equation: Any, inputs: Values) -> None:
        """Record the comparisons that are combined with an unknown array, element by element."""
        for atom, known in zip(equation.invars, inputs, strict=True):
            for look in known.one_hot if known else ():
                others = [x for x, y in zip(equation.invars, inputs, strict=True) if y is None]
                if any(_by_element(equation, atom, other, look.axis) for other in others):
                    shape = tuple(others[0].aval.shape)
                    self.looks.append(look._replace(shape=shape))

    def _scan(self, equation: Any, inputs: Values) -> Values:
        """Evaluate the body of a scan, in a scan; the carry is unknown."""
        body, params = open_jaxpr(equation.params["jaxpr"]), equation.params
        consts, carry = scan_sizes(equation, body[0])
        bound, scanned = inputs[:consts], inputs[consts + carry :]
        stacks = {i: (x.array, x.raw) for i, x in enumerate(scanned) if x is not None}
        looks: list[_Look] = []
        ends: Values = []

        def turn(_: None, slices: Mapping[int, Any]) -> tuple[None, Any]:
            parts: Values = [None] * len(scanned)
            for i, (array, before) in slices.items():
                stacked = scanned[i]
                assert stacked is not None, "only known arrays are in stacks"
                parts[i] = _Known(array, stacked.leaves, before, stacked.moved)
            walk = _Walk()
            ends[:] = walk.run(*body, [*bound, *[None] * carry, *parts])[carry:]
            looks[:] = walk.looks
            return None, (
                [look.raw for look in looks],
                [(x.array, x.raw) for x in ends if x is not None],
            )

        options = {"length": params["length"], "reverse": params["reverse"]}
        _, (raws, stacked) = jax.lax.scan(turn, None, stacks, **options)
        self.looks += [x._replace(raw=raw) for x, raw in zip(looks, raws, strict=True)]
        known = iter(stacked)
        made = lambda x: _Known((pair := next(known))[0], x.leaves, pair[1], x.moved)
        return [*[None] * carry, *[None if x is None else made(x) for x in ends]]


def _run(equation: Any, arrays: Sequence[Any]) -> Sequence[Any]:
    primitive = equation.primitive
    found = primitive.bind(*arrays, **primitive.get_bind_params(equation.params))
    return found if primitive.multiple_results else [found]


def _moved(equation: Any, inputs: Sequence[_Known], made: _Known) -> _Known:
    """Return the output of an equation that moves numbers without changing them."""
    before = None
    if any(x.before is not None for x in inputs):
        (before,) = _run(equation, [x.raw for x in inputs])
    kinds = [(x.aval.dtype, made.array.dtype) for x in equation.invars]
    same = all(np.can_cast(old, new) for old, new in kinds) and equation.primitive.name != "pad"
    moved = same and len(made.leaves) == 1 and all(x.moved for x in inputs)
    looks = tuple(_followed(inputs, made))
    return dataclasses.replace(made, before=before, moved=moved, one_hot=looks)


def _followed(inputs: Sequence[_Known], made: _Known) -> Iterator[_Look]:
    """Yield the comparisons with all classes that an array depends on, element by element."""
    for look in (look for x in inputs for look in x.one_hot):
        if np.shape(made.array)[look.axis :][:1] == (look.entries,):
            yield look


def _constant(const: Any) -> _Known:
    """Return a constant of the program, marked if it counts 0, 1, 2 ... along a dim."""
    shape, dtype = np.shape(const), getattr(const, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or max(shape, default=1) < 2:
        return _Known(const)
    if np.prod(shape) != max(shape):
        return _Known(const)
    dim = int(np.argmax(shape))
    counts = np.array_equal(np.ravel(const), np.arange(shape[dim]))
    return _Known(const, counts=dim if counts else None)


def _counts(equation: Any, inputs: Sequence[_Known]) -> int | None:
    """Return the dim along which the output counts 0, 1, 2 ..., if it does."""
    name, params, before = equation.primitive.name, equation.params, None
    if name == "iota":
        return params["dimension"]
    before = inputs[0].counts
    if before is None or name not in _MOVES:
        return None
    after, entries = equation.outvars[0].aval.shape, np.shape(inputs[0].array)[before]
    if name == "broadcast_in_dim":
        dim = params["broadcast_dimensions"][before]
        return dim if after[dim] == entries else None
    if name == "reshape":
        wide = [dim for dim, size in enumerate(after) if size > 1]
        return wide[0] if len(wide) == 1 and after[wide[0]] == entries else None
    return before if name == "convert_element_type" else None


def _compared(inputs: Sequence[_Known], made: _Known) -> tuple[_Look, ...]:
    """Return a use for integers that are compared with all of 0, 1, 2 ...."""
    for classes, labels in (inputs, inputs[::-1]):
        axis = classes.counts
        if axis is None or classes.leaves or not labels.leaves:
            continue
        entries = np.shape(classes.array)[axis]
        if np.shape(made.array)[axis] == entries > 1:
            shape = np.shape(made.array)
            return (_Look(entries, labels.leaves, shape, labels.raw, labels.moved, axis),)
    return ()


def _handles_out_of_range(params: Mapping[str, Any]) -> bool:
    """Return whether a gather defines its result for out-of-range indices."""
    mode, fill = params["mode"], params["fill_value"]
    if mode == jax.lax.GatherScatterMode.CLIP:  # without a collapsed dim: a dynamic slice
        return bool(params["dimension_numbers"].collapsed_slice_dims)
    return fill is not None and not np.isnan(fill)


def _by_element(equation: Any, one: Any, other: Any, axis: int | None) -> bool:
    """Return whether an equation pairs the elements of two arrays along a dim of the first."""
    if equation.primitive.name in _BY_ELEMENT:
        return one.aval.shape[axis:] == other.aval.shape[axis:]
    if equation.primitive.name != "dot_general":
        return False
    contracted, batched = equation.params["dimension_numbers"]
    side = next(i for i, atom in enumerate(equation.invars) if atom is one)
    return axis in contracted[side] and bool(batched[side])


def _softmaxes(program: Any) -> Iterator[int]:
    """Yield the sizes of the dims over which exponentials are summed."""
    powers = set()
    for equation in program.eqns:
        name, atoms = equation.primitive.name, [x for x in equation.invars if not hasattr(x, "val")]
        moved = name in {"convert_element_type", "select_n"} and powers & {*atoms}
        if name == "exp" or moved:
            powers.add(equation.outvars[0])
        if name == "reduce_sum" and atoms[0] in powers:
            yield from (atoms[0].aval.shape[axis] for axis in equation.params["axes"])
        for within in inner_jaxprs(equation):
            yield from _softmaxes(within)
