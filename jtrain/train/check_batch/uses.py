"""Uses of a batch's values by a traced loss for which only some values are right.

The trace is evaluated with the arrays of the batch known and everything else (parameters, state,
keys) unknown. Values that depend only on the batch stay known, so each index is known at its use,
and nothing of the model is computed.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.interpret import CALLS, Equation, Interpreter, bind
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
    *("abs", "add", "and", "argmax", "argmin", "clamp", "cummax", "cumsum", "div", "dynamic_slice"),
    *("eq", "floor", "gather", "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "name", "ne"),
    *("neg", "not", "or", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"),
    *("rem", "round", "select_n", "sign", "sub", "xor"),
}


def _static(default: Any = frozenset()) -> Any:
    """Return a field that is not an array, for JAX."""
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Use:
    """Values of a batch, used as indices into a dim or by a loss that is defined for some only."""

    values: Any
    """Integers, or the numbers of `domain`; in `Uses.found` their shape."""
    leaves: frozenset[str] = _static()
    """Arrays of the batch that the values are computed from."""
    entries: int = _static(0)
    """Size of the dim: valid indices are 0 .. entries - 1."""
    shape: tuple[int, ...] = _static(())
    moved: bool = _static(False)
    """True if the integers are the unchanged values of one array of the batch."""
    domain: str = _static("")
    """As `in_domain` takes it; empty for indices."""
    compared: bool = _static(False)
    """True if the integers are compared with all of 0 .. entries - 1."""


class Uses(NamedTuple):
    """The uses in a traced function."""

    found: Sequence[Use]
    evaluate: Callable[[Mapping[str, Any]], Sequence[Use]]
    """Function of the batch by name: the uses with their values. Only `leaves` need be given."""
    repeated: str
    """`softmax` or `sigmoid`, if one is taken of itself."""

    @property
    def leaves(self) -> frozenset[str]:
        """Arrays of the batch that some use is computed from."""
        return frozenset().union(*(use.leaves for use in self.found))


def find_uses(
    program: Any, batch: Mapping[str, Any], leaves: Sequence[str | None] | None = None
) -> Uses:
    """Return the uses in a traced function of a batch. Nothing is run.

    - A gather, such as `logits[rows, labels]`, in an array that depends on `unknown`. With an
      explicit `mode="clip"` or `fill_value` other integers are intended, and it is no use.
    - A comparison with all classes (`jax.nn.one_hot`), if there is a softmax over as many.
      Otherwise a row of zeros may be intended.
    - What `in_range` and `in_domain` mark.

    A negative integer, which JAX counts from the end, is out of range here. The search enters jit,
    remat, custom derivatives and scan, but not `while_loop` and `cond`.

    Args:
        program: `jax.make_jaxpr(fn)(unknown, batch)`, where `unknown` is any pytree.
        batch: shapes by name.
        leaves: for each input of the program the name of its batch array, None if unknown; by
            default the arrays of the batch are the last inputs.
    """
    names = sorted(batch)
    inputs = leaves or [None] * (len(program.in_avals) - len(names)) + names
    softmaxes = _Softmaxes()
    softmaxes.run(program, [""] * len(program.in_avals))

    def evaluate(given: Mapping[str, Any]) -> list[Use]:
        search = _Search()
        # Arrays that nothing depends on may have any value; the compiler drops them.
        zeros = {n: jnp.zeros(x.shape, x.dtype) for n, x in batch.items() if n not in given}
        known = {n: _Known(x, frozenset([n]), moved=True) for n, x in (zeros | {**given}).items()}
        search.run(program, [None if name is None else known[name] for name in inputs])
        return [x for x in search.found if not x.compared or x.entries in softmaxes.sizes]

    return Uses(jax.eval_shape(evaluate, dict(batch)), jax.jit(evaluate), softmaxes.repeated)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """Array that depends on the batch only."""

    array: Any
    leaves: frozenset[str] = _static()
    """Arrays of the batch that it is computed from."""
    before: Any = None
    """The array before negative integers were wrapped; None if none were."""
    moved: bool = _static(False)
    """True if `raw` has the values of one array of the batch and no others."""
    of: "tuple[str, _Known] | None" = _static(None)
    """Operation and input that made it: `x < 0`, `x + number`."""
    counts: int | None = _static(None)
    """Dim along which it counts 0, 1, 2 ..., if it does."""

    @property
    def raw(self) -> Any:
        return self.array if self.before is None else self.before

    def plain(self) -> "_Known":
        """Return the array without what is known about its dims."""
        return _Known(self.array, self.leaves, self.before, self.moved)


class _Search(Interpreter[_Known | None]):
    """Arrays that depend on the batch only; None for any other."""

    enters = CALLS | {"scan"}

    def __init__(self) -> None:
        self.found: list[Use] = []

    def constant(self, value: Any, aval: Any) -> _Known:
        shape, dim = aval.shape, int(np.argmax([*aval.shape, 0]))
        counts = aval.size > 1 and aval.size == shape[dim]
        counts = counts and jnp.issubdtype(aval.dtype, jnp.integer)
        counts = counts and np.array_equal(np.ravel(value), np.arange(aval.size))
        return _Known(value, counts=dim if counts else None)

    def equation(self, equation: Equation, inputs: list[_Known | None]) -> Sequence[_Known | None]:
        if inputs and not any(inputs):
            return [None] * len(equation.outvars)
        return super().equation(equation, inputs)

    def scan(self, equation: Equation, turn: Any, carry: Any, rows: Any) -> Sequence[Any]:
        """Evaluate the body of a scan, in a scan; the carry is unknown."""
        around, unknown = self.found, [None] * len(carry)

        def step(_: None, rows: Any) -> tuple[None, Any]:
            self.found = []
            outputs = turn(unknown, rows)[len(carry) :]
            return None, (self.found, [x and x.plain() for x in outputs])

        options = {key: equation.params[key] for key in ("length", "reverse")}
        rows = [x and x.plain() for x in rows]
        _, (found, stacked) = jax.lax.scan(step, None, rows, **options)
        self.found = [*around, *found]
        return [*unknown, *stacked]

    def operation(self, equation: Equation, inputs: list[_Known | None]) -> Sequence[_Known | None]:
        name, known = equation.primitive.name, [x for x in inputs if x is not None]
        if name in _SAME:
            return inputs
        if len(known) == len(inputs) and name in _MOVES | _COMPUTES:
            return self._compute(equation, known)
        if inputs and inputs[0] is None:
            self._index(equation, inputs)
        return [None] * len(equation.outvars)

    def _compute(self, equation: Equation, inputs: list[_Known]) -> Sequence[_Known]:
        name, leaves = equation.primitive.name, frozenset().union(*(x.leaves for x in inputs))
        arrays = bind(equation, [x.array for x in inputs])
        if len(arrays) != 1:
            return [_Known(array, leaves) for array in arrays]
        if name == "name" and leaves:
            if mark := MARK.fullmatch(equation.params["name"]):
                shape = tuple(map(int, re.findall(r"\d+", mark[2])))
                raw, moved = inputs[0].raw, inputs[0].moved
                self.found.append(Use(raw, leaves, int(mark[1]), shape, moved))
                return [_Known(arrays[0])]  # the marked values are looked up elsewhere
            if mark := DOMAIN.fullmatch(equation.params["name"]):
                self.found.append(Use(arrays[0], leaves, domain=mark[1]))
        made = _Known(arrays[0], leaves, counts=_counted_dim(equation, inputs))
        if name in _MOVES:
            made = _moved(equation, inputs, made)
        if name in {"lt", "add"} and not inputs[1].leaves:
            made = dataclasses.replace(made, of=(name, inputs[0]))
        if name == "select_n" and len(inputs) == 3:
            negative, index, wrapped = inputs
            if negative.of == ("lt", index) and wrapped.of == ("add", index):
                made = dataclasses.replace(made, before=index.raw, moved=index.moved)
        if name == "eq":
            self._compare(inputs, np.shape(arrays[0]))
        return [made]

    def _index(self, equation: Equation, inputs: list[_Known | None]) -> None:
        name, params = equation.primitive.name, equation.params
        shape = equation.invars[0].aval.shape
        chosen: dict[int, tuple[_Known, Any]] = {}
        if name == "dynamic_slice":
            chosen = {dim: (x, x.raw) for dim, x in enumerate(inputs[1:]) if x is not None}
        elif name == "gather" and (index := inputs[1]) and not _handles_out_of_range(params):
            dims = params["dimension_numbers"].start_index_map
            chosen = {dim: (index, index.raw[..., i]) for i, dim in enumerate(dims)}
        for dim, (index, raw) in chosen.items():
            if index.leaves and params["slice_sizes"][dim] == 1:  # the start of a window is clamped
                self.found.append(Use(raw, index.leaves, shape[dim], shape, index.moved))

    def _compare(self, inputs: Sequence[_Known], shape: tuple[int, ...]) -> None:
        for classes, labels in (inputs, inputs[::-1]):
            axis = classes.counts
            if axis is not None and labels.leaves and not classes.leaves:
                entries = np.shape(classes.array)[axis]
                if shape[axis] == entries > 1:
                    use = Use(labels.raw, labels.leaves, entries, shape, labels.moved)
                    self.found.append(dataclasses.replace(use, compared=True))


def _moved(equation: Equation, inputs: Sequence[_Known], made: _Known) -> _Known:
    """Return the output of an equation that moves numbers without changing them."""
    before = None
    if any(x.before is not None for x in inputs):
        (before,) = bind(equation, [x.raw for x in inputs])
    kinds = [(x.aval.dtype, made.array.dtype) for x in equation.invars]
    same = all(np.can_cast(old, new) for old, new in kinds) and equation.primitive.name != "pad"
    moved = same and len(made.leaves) == 1 and all(x.moved for x in inputs)
    return dataclasses.replace(made, before=before, moved=moved)


def _counted_dim(equation: Equation, inputs: Sequence[_Known]) -> int | None:
    """Return the dim along which the output counts 0, 1, 2 ..., if it does."""
    name, after = equation.primitive.name, equation.outvars[0].aval.shape
    if name == "iota":
        return equation.params["dimension"]
    if (before := inputs[0].counts) is None:
        return None
    entries, dim = np.shape(inputs[0].array)[before], None
    if name == "convert_element_type":
        dim = before
    elif name == "broadcast_in_dim":
        dim = equation.params["broadcast_dimensions"][before]
    elif name == "reshape" and sum(size > 1 for size in after) == 1:
        dim = int(np.argmax(after))
    return dim if dim is not None and after[dim] == entries else None


def _handles_out_of_range(params: Mapping[str, Any]) -> bool:
    mode, fill = params["mode"], params["fill_value"]
    if mode == jax.lax.GatherScatterMode.CLIP:  # without a collapsed dim: a dynamic slice
        return bool(params["dimension_numbers"].collapsed_slice_dims)
    return fill is not None and not np.isnan(fill)


class _Softmaxes(Interpreter[str]):
    """What a value is within a softmax or a sigmoid; empty for any other.

    A softmax is `exp / total`. Another of it is an `exp` of it less its `largest`, as every stable
    implementation has it; a cross entropy of two classes has `exp(-abs(x))`.
    """

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        """Sizes of the dims over which exponentials are summed."""
        self.repeated = ""
        """`softmax` or `sigmoid`, if the program takes an exponential of one."""

    def constant(self, value: Any, aval: Any) -> str:
        return ""

    def join(self, *values: str) -> str:
        return next(filter(None, values), "")

    def operation(self, equation: Equation, inputs: list[str]) -> Sequence[str]:
        name, made = equation.primitive.name, ""
        if name == "exp":
            again = {"less its largest": "softmax", "size of a sigmoid": "sigmoid"}
            self.repeated = again.get(inputs[0], self.repeated)
            made = "exp"
        elif name == "reduce_sum" and inputs[0] == "exp":
            shape = equation.invars[0].aval.shape
            self.sizes |= {shape[axis] for axis in equation.params["axes"]}
            made = "total"
        elif name in _KEEPS:
            made = self.join(*inputs)
        elif name == "neg":
            made = inputs[0]
        else:
            made = _SOFTMAX.get((name, *inputs), "")
        return [made] * len(equation.outvars)


_KEEPS = _SAME | _MOVES | {"max", "select_n"}
_SOFTMAX = {
    ("div", "exp", "total"): "softmax",
    ("reduce_max", "softmax"): "largest",
    ("sub", "softmax", "largest"): "less its largest",
    ("logistic", ""): "sigmoid",
    ("sub", "sigmoid", ""): "sigmoid",
    ("abs", "sigmoid"): "size of a sigmoid",
}
