"""Name stacks of JAX read as module paths and phases."""

import re
from typing import Literal, NamedTuple, TypeAlias

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
    parts = [part for part in plain.split("/") if part and _names_module(part)]
    return Scope(without_repeats(tuple(parts)), phase)


def parse_operation_name(name: str) -> Scope:
    """Read the `op_name` of a compiled operation, whose last part is the operation itself."""
    scope, _, _ = name.rpartition("/")
    return parse_scope(scope)


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


def _names_module(part: str) -> bool:
    # An einsum is a named scope of its own: `btd,vd->btv`.
    return part not in _STRUCTURE and "->" not in part and not _BRANCH.fullmatch(part)
