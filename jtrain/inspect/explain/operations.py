"""The operations of a traced program in a flat list: module, pass, FLOPs and bytes."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.core.interpret import Equation, Interpreter, repetitions
from jtrain.inspect.debug.source import SourceLine, find_source
from jtrain.train.flops import product_flops

Phase: TypeAlias = Literal["forward", "backward", "recomputed"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed")

_RECOMPUTED = "rematted_computation"
_TRANSFORM = re.compile(r"\b(jvp|transpose|vmap|pmap|linearize|partial_eval|custom_vjp)\(")
_CALL = re.compile(r"\b(jit|pjit|shard_map|xla_call|named_call)\([^()]*\)")
# Parts that JAX adds to the names of compiled operations, of no module.
_STRUCTURE = {
    *("while", "body", "cond", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat"),
    *("remat2", "custom_jvp_call", "custom_vjp_call", "shard_map", "jit", "scan", _RECOMPUTED),
}
_BRANCH = re.compile(r"branch_\d+_fun")


class Scope(NamedTuple):
    """The place of an operation: the modules around it, and the pass that it belongs to."""

    path: tuple[str, ...]
    """Names of modules and named scopes, outermost first."""
    phase: Phase | None
    """None where the name stack says nothing about it."""


def parse_scope(stack: str) -> Scope:
    """Read a name stack such as `transpose(jvp(blocks/0))/rematted_computation/qkv`."""
    phase: Phase | None = None
    if _RECOMPUTED in stack:
        phase = "recomputed"
    elif "transpose(" in stack:
        phase = "backward"
    elif "jvp(" in stack:
        phase = "forward"
    plain = _TRANSFORM.sub("", _CALL.sub("", stack)).replace(")", "").replace("(", "")
    # An einsum is a named scope of its own: `btd,vd->btv`.
    is_module = lambda part: part not in _STRUCTURE and "->" not in part
    parts = [
        part
        for part in plain.split("/")
        if part and is_module(part) and not _BRANCH.fullmatch(part)
    ]
    return Scope(without_repeats(tuple(parts)), phase)


def without_repeats(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path without the second of two equal halves, which the transpose of remat makes."""
    half = len(path) // 2
    doubled = half and len(path) % 2 == 0 and path[:half] == path[half:]
    return path[:half] if doubled else path


def grouped_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path with `*` for numbers: layers of one kind share it."""
    return tuple("*" if part.isdigit() else part for part in path)


def is_function(name: str) -> bool:
    """Return whether the last part of a path is a function or line and no module."""
    return name.endswith(")") or ".py:" in name


# Operations that change no number: a compiler computes them together with their readers.
_VIEWS = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "name", "copy_p", "copy"}
NO_MODULE = "(no module)"
# Lines that only place arrays: what they are called for is more telling.
_PACKAGE = Path(__file__).parents[2]
_PLACEMENT = (str(_PACKAGE / "parallel"), str(_PACKAGE / "core" / "placement.py"))


class Operation(NamedTuple):
    """A primitive operation of a program, with all its runs."""

    primitive: str
    path: tuple[str, ...]
    """Modules and named scopes around it; the function in its source line where there are none."""
    phase: Phase
    source: SourceLine | None
    """The innermost line outside of libraries."""
    times: int
    """Runs in one run of the program."""
    counted: bool
    """False in a while_loop, whose number of turns depends on the data: it counts as one."""
    flops: float | None
    """FLOPs of a product in all runs, 0 for other operations; None for an unknown kernel."""
    bytes: int
    """Bytes of its inputs and outputs in all runs."""


def list_operations(program: Any) -> list[Operation]:
    """Return the operations of a program (`jax.make_jaxpr(fn)(...)`) in their order.

    The body of a scan is listed once, with its turns in `times`; of a cond the branch with the most
    FLOPs is listed.
    """
    lister = _Lister()
    lister.run(program, [None] * len(program.in_avals))
    return lister.found


class _Lister(Interpreter[None]):
    """Operations by their equations; values are not known."""

    def __init__(self) -> None:
        self.found: list[Operation] = []

    def constant(self, value: Any, aval: Any) -> None:
        return None

    def join(self, *values: None) -> None:  # so a body is evaluated once
        return None

    def cond(self, equation: Equation, index: None, branches: Any) -> Sequence[None]:
        """List the branch with the most FLOPs."""
        before, listed = self.found, []
        for branch in branches:
            self.found = list(before)
            outputs = branch()
            flops = sum(op.flops or 0.0 for op in self.found[len(before) :])
            listed.append((flops, self.found, outputs))
        _, self.found, outputs = max(listed, key=lambda each: each[0])
        return outputs

    def operation(self, equation: Equation, inputs: list[None]) -> Sequence[None]:
        name, own = equation.primitive.name, product_flops(equation)
        scope = scope_in(self.calls, equation)
        source = find_line(equation, self.calls)
        runs = [repetitions(call) for call in self.calls]
        times = math.prod(1 if n is None else n for n in runs)
        each = sum(num_bytes(x.aval) for x in (*equation.invars, *equation.outvars))
        operation = Operation(
            primitive=name,
            path=scope.path or function_path(source),
            phase=scope.phase or "forward",
            source=source,
            times=times,
            counted=None not in runs,
            flops=None if own is None else own * times,
            bytes=0 if name in _VIEWS else each * times,
        )
        self.found.append(operation)
        return [None] * len(equation.outvars)


def scope_in(calls: Sequence[Equation], equation: Equation) -> Scope:
    """Return the scope of an equation: its own name stack within those around it."""
    path, phase = (), None
    for each in (*calls, equation):
        scope = parse_scope(str(each.source_info.name_stack))
        path = without_repeats((*path, *scope.path))
        # What is recomputed stays that; within the backward pass nothing is of the forward pass.
        keeps = phase == "recomputed" or scope.phase is None
        keeps |= phase == "backward" and scope.phase == "forward"
        phase = phase if keeps else scope.phase
    return Scope(path, phase)


def find_line(eqn: Any, calls: Sequence[Any] = ()) -> SourceLine | None:
    """Return the innermost source line of an operation, outside of libraries and layouts."""
    lines = find_source(eqn, calls, _PLACEMENT)
    return lines[0] if lines else None


def function_path(source: SourceLine | None) -> tuple[str, ...]:
    """Return the path of an operation outside of all modules: the function of its source line."""
    if source is None:
        return (NO_MODULE,)
    unnamed = source.name.startswith("<")  # a lambda
    return (f"{Path(source.file).stem}.py:{source.line}" if unnamed else f"{source.name}()",)


def outer_paths(operations: Sequence[Operation]) -> frozenset[tuple[str, ...]]:
    """Return the paths of the modules that hold other modules."""
    return frozenset(op.path[:depth] for op in operations for depth in range(1, len(op.path)))


def split_own_work(
    path: tuple[str, ...], source: SourceLine | None, outer: frozenset[tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the path, and below it the function where a module that holds others works itself."""
    return (*path, *function_path(source)) if path in outer else path


def num_bytes(aval: Any) -> int:
    """Return the bytes of an array of this shape and type; 0 for a key, or what is not an array."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * jax.dtypes.canonicalize_dtype(dtype).itemsize


def format_aval(aval: Any) -> str:
    """Return a shape and dtype as text: `float32[16,64,128]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
