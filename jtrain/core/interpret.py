"""Interpretation of traced programs (jaxprs): evaluation over any values, lists of operations.

Nothing else in the package reads the equations of a program. An `Interpreter` evaluates a program
by transfer functions; `equations_in` and `executions` list its operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

V = TypeVar("V")
Program: TypeAlias = Any  # a jaxpr, closed over its constants or not
Equation: TypeAlias = Any  # of a jaxpr

# Equations that only call a program, by their names in all versions of JAX.
CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)
PROGRAMS = CALLS | {"scan", "while", "cond", "shard_map", "custom_partitioning"}
REMAT = {"remat", "remat2", "checkpoint"}
OPAQUE = {"pallas_call", "ffi_call"}  # kernels in another language


class Interpreter(Generic[V]):
    """Evaluation of a program over values of any kind, one equation after the other.

    A subclass has the transfer functions `constant`, `operation` and `join`. By default a loop is
    evaluated until the join of its carry is steady, and a cond takes all its branches, as values
    that stand for sets of numbers need; `scan`, `while_loop` and `cond` may be replaced.
    """

    enters: AbstractSet[str] = PROGRAMS
    """Equations whose programs are evaluated; any other is an operation."""
    calls: tuple[Equation, ...] = ()
    """The entered equations around the current one, outermost first."""

    def constant(self, value: Any, aval: Any) -> V:
        """Return the value of a constant or literal of this shape and type."""
        raise NotImplementedError

    def operation(self, equation: Equation, inputs: list[V]) -> Sequence[V]:
        """Return the outputs of an equation that is not entered."""
        raise NotImplementedError

    def join(self, *values: V) -> V:
        """Return a value that stands for any of these, from several turns or branches."""
        raise NotImplementedError

    def choose(self, decision: V, *values: V) -> V:
        """Return a value that stands for one of these, which another value selects."""
        del decision
        return self.join(*values)

    def scan(
        self,
        equation: Equation,
        turn: Callable[[Sequence[V], Sequence[V]], list[V]],
        carry: list[V],
        rows: list[V],
    ) -> Sequence[V]:
        """Return the outputs of a scan; `turn(carry, rows)` evaluates its body."""
        while True:
            outputs = turn(carry, rows)
            before, carry = carry, list(map(self.join, carry, outputs))
            if carry == before:
                return outputs

    def while_loop(
        self,
        equation: Equation,
        condition: Callable[[Sequence[V]], V],
        turn: Callable[[Sequence[V]], list[V]],
        carry: list[V],
    ) -> Sequence[V]:
        """Return the outputs of a while_loop."""
        before = None
        while carry != before:
            before, carry = carry, list(map(self.join, carry, turn(carry)))
        repeat = condition(carry)
        return [self.choose(repeat, value) for value in carry]

    def cond(
        self, equation: Equation, index: V, branches: Sequence[Callable[[], list[V]]]
    ) -> Sequence[V]:
        """Return the outputs of a cond."""
        outputs = [branch() for branch in branches]
        return [self.choose(index, *values) for values in zip(*outputs, strict=True)]

    def run(self, program: Program, inputs: Sequence[V]) -> list[V]:
        """Return the outputs of a program."""
        jaxpr, constants = open_jaxpr(program)
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            values[variable] = self.constant(constant, variable.aval)

        def read(atom: Any) -> V:
            return self.constant(atom.val, atom.aval) if is_literal(atom) else values[atom]

        last_uses = {x: i for i, e in enumerate(jaxpr.eqns) for x in _variables(e.invars)}
        last_uses |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
        for i, equation in enumerate(jaxpr.eqns):
            outputs = self.equation(equation, [read(x) for x in equation.invars])
            values |= zip(equation.outvars, outputs, strict=True)
            for variable in {*_variables(equation.invars), *equation.outvars}:
                if last_uses.get(variable, -1) <= i:
                    values.pop(variable, None)  # frees its memory
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation: Equation, inputs: list[V]) -> Sequence[V]:
        """Return the outputs of an equation."""
        if equation.primitive.name not in self.enters:
            return self.operation(equation, inputs)
        around = self.calls
        self.calls = (*around, equation)
        try:
            return self._enter(equation, inputs)
        finally:
            self.calls = around

    def _enter(self, equation: Equation, inputs: list[V]) -> Sequence[V]:
        name, params, programs = equation.primitive.name, equation.params, inner_programs(equation)
        if name == "scan":
            (body,) = programs
            first, count = scan_sizes(equation, body)
            consts, carry, rows = inputs[:first], inputs[first:][:count], inputs[first + count :]
            turn = lambda carry, rows: self.run(body, [*consts, *carry, *rows])
            return self.scan(equation, turn, carry, rows)
        if name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            of_condition, of_body = inputs[:first], inputs[first:][:second]
            return self.while_loop(
                equation,
                lambda carry: self.run(params["cond_jaxpr"], [*of_condition, *carry])[0],
                lambda carry: self.run(params["body_jaxpr"], [*of_body, *carry]),
                inputs[first + second :],
            )
        if name == "cond":
            branches = [
                lambda program=program: self.run(program, inputs[1:]) for program in programs
            ]
            return self.cond(equation, inputs[0], branches)
        return self.run(programs[0], inputs)


def bind(equation: Equation, inputs: Sequence[Any], **changes: Any) -> list[Any]:
    """Compute an equation on arrays, some of its parameters changed; return its outputs."""
    primitive = equation.primitive
    params = primitive.get_bind_params({**equation.params, **changes})
    outputs = primitive.bind(*inputs, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def is_literal(atom: Any) -> bool:
    """Return whether an input or output of an equation is a number and no variable."""
    return hasattr(atom, "val")


def is_opaque(primitive: str) -> bool:
    """Return whether a primitive is a kernel that no jaxpr describes, such as cuDNN attention."""
    return primitive in OPAQUE or primitive.startswith("dot_product_attention")


def open_jaxpr(program: Program) -> tuple[Any, Sequence[Any]]:
    """Return the equations of a program, closed over its constants or not, and the constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def inner_programs(equation: Equation) -> list[Program]:
    """Return the programs inside an equation."""

    def programs(value: Any) -> Iterator[Program]:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, tuple | list):
            for item in value:
                yield from programs(item)

    return [program for value in equation.params.values() for program in programs(value)]


def scan_sizes(scan: Equation, body: Program) -> tuple[int, int]:
    """Return how many inputs of a scan are constants of its body, and how many are carried."""
    # By shapes, as parameters have other names in jax 0.12: what is scanned has a dim more outside.
    jaxpr, _ = open_jaxpr(body)
    same = lambda xs, ys: sum(
        len(x.aval.shape) == len(y.aval.shape) for x, y in zip(xs, ys, strict=True)
    )
    carry = same(scan.outvars, jaxpr.outvars)
    return same(scan.invars, jaxpr.invars) - carry, carry


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not is_literal(atom)]


# The operations of a program.


class Execution(NamedTuple):
    """An equation with the number of its runs in one run of the program."""

    equation: Equation
    times: int
    counted: bool
    """False in a while_loop, whose number of turns depends on the data: it counts as one."""


def executions(
    program: Program, cost: Callable[[Equation], float] | None = None
) -> Iterator[Execution]:
    """Yield the equations of a program, the inner ones too; nothing is run.

    Args:
        cost: of one run of an equation; if given, only the most expensive branch of a cond counts.
    """
    for equation in open_jaxpr(program)[0].eqns:
        yield Execution(equation, 1, True)
        programs = [] if is_opaque(equation.primitive.name) else inner_programs(equation)
        if cost and equation.primitive.name == "cond":
            of_run = lambda x: x.times * cost(x.equation)
            programs = [max(programs, key=lambda p: sum(map(of_run, executions(p, cost))))]
        times = repetitions(equation)
        for inner in programs:
            for each in executions(inner, cost):
                counted = each.counted and times is not None
                runs = each.times * (1 if times is None else times)
                yield Execution(each.equation, runs, counted)


def repetitions(equation: Equation) -> int | None:
    """Return how often the program of an equation runs; None for a while_loop."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        axes, sizes = params.get("manual_axes", ()), dict(params["mesh"].shape)
        return prod(sizes[axis] for axis in axes or sizes)
    return None if name == "while" else 1


def equations_in(program: Program) -> Iterator[Equation]:
    """Yield the equations of a program, the inner ones too, each before those inside it."""
    for equation in open_jaxpr(program)[0].eqns:
        yield equation
        yield from equations_within(equation)


def equations_within(equation: Equation) -> Iterator[Equation]:
    """Yield the equations of the programs inside an equation."""
    for program in inner_programs(equation):
        yield from equations_in(program)


def operations(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Return the names of all primitives in `fn(*args)`, nested ones included. Nothing is run."""
    return {equation.primitive.name for equation in equations_in(jax.make_jaxpr(fn)(*args))}


def computed_outputs(program: Program) -> list[Any]:
    """Return shape and type of each output that is neither an input nor a constant, each once."""
    jaxpr, _ = open_jaxpr(program)
    given = {*jaxpr.invars, *jaxpr.constvars}
    return [x.aval for x in dict.fromkeys(_variables(jaxpr.outvars)) if x not in given]


# Two programs, and changed ones.


class DifferentProgramsError(Exception):
    """Two traces that are not of one program."""


def pair_equations(
    one: Program, other: Program, calls: tuple[Equation, ...] = ()
) -> Iterator[tuple[tuple[Equation, ...], Equation, Equation]]:
    """Yield the equations of two traces of one program in pairs, after the calls around the first.

    Raises:
        DifferentProgramsError: if they differ in more than shapes, parameters and constants.
    """
    first, second = (open_jaxpr(program)[0].eqns for program in (one, other))
    if len(first) != len(second):
        raise DifferentProgramsError
    for a, b in zip(first, second, strict=True):
        programs = inner_programs(a), inner_programs(b)
        if a.primitive.name != b.primitive.name or len(programs[0]) != len(programs[1]):
            raise DifferentProgramsError
        yield calls, a, b
        for inner in zip(*programs, strict=True):
            yield from pair_equations(*inner, (*calls, a))


def literals(program: Program) -> list[Any]:
    """Return constants, inputs and outputs of all equations in order, None for each variable."""
    jaxpr, constants = open_jaxpr(program)
    found = list(constants)
    for equation in jaxpr.eqns:
        found += [getattr(atom, "val", None) for atom in equation.invars]
        for inner in inner_programs(equation):
            found += literals(inner)
    return [*found, *(getattr(atom, "val", None) for atom in jaxpr.outvars)]


def place_of(calls: Sequence[Equation], equation: Equation) -> tuple[int, ...]:
    """Return what tells an equation apart from any other: a jaxpr may be called at many places."""
    return (*map(id, calls), id(equation))


def replace_equations(
    program: Program,
    replacements: Mapping[tuple[int, ...], Equation],
    calls: tuple[Equation, ...] = (),
) -> Program:
    """Return a program with some equations replaced, inner ones too, by their `place_of`."""
    jaxpr, _ = open_jaxpr(program)
    if jaxpr is not program:  # closed over its constants; jax 0.12 has one class for both
        return program.replace(jaxpr=replace_equations(jaxpr, replacements, calls))

    def replace(equation: Equation) -> Equation:
        place, inside = place_of(calls, equation), (*calls, equation)
        if place in replacements:
            return replacements[place]
        if not any(key[: len(place)] == place for key in replacements):
            return equation
        return equation.replace(params={k: within(v, inside) for k, v in equation.params.items()})

    def within(value: Any, inside: tuple[Equation, ...]) -> Any:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            return replace_equations(value, replacements, inside)
        return tuple(within(x, inside) for x in value) if type(value) is tuple else value

    return jaxpr.replace(eqns=[replace(equation) for equation in jaxpr.eqns])


def replace_equation(equation: Equation, fn: Callable[..., Any]) -> Equation:
    """Return an equation that computes `fn` of its inputs, in the place of another."""

    def like(aval: Any) -> jax.ShapeDtypeStruct:
        varying = getattr(aval, "vma", None)  # axes of a shard_map around it
        more = {"vma": varying} if varying else {}
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)

    traced = jax.make_jaxpr(jax.jit(fn))(*(like(x.aval) for x in equation.invars))
    made = open_jaxpr(traced)[0].eqns[-1]
    return equation.replace(primitive=made.primitive, params=made.params, effects=made.effects)


def pruned(fn: Callable[[Any], Any], example: Any) -> tuple[Callable[[Any], Any], int]:
    """Return `fn` without the operations that no output needs, and the number of the others.

    Args:
        example: a value or the shapes of what `fn` takes.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(example)
    jaxpr, constants = open_jaxpr(program)
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    structure = jax.tree.structure(shapes)

    def evaluate(given: Any) -> Any:
        return structure.unflatten(eval_jaxpr(needed, constants, *jax.tree.leaves(given)))

    return evaluate, sum(1 for _ in equations_in(needed))


def as_function(program: Program) -> Callable[..., list[Any]]:
    """Return a program as a function of arrays."""
    jaxpr, constants = open_jaxpr(program)
    return lambda *inputs: eval_jaxpr(jaxpr, constants, *inputs)
