"""Traced programs of a loss, and what autodiff saves in the forward pass for the backward pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from jtrain.core.interpret import Interpreter, equations_within
from jtrain.core.loss import combine
from jtrain.core.state import TrainState
from jtrain.errors import LossError
from jtrain.errors.user_code import user_code
from jtrain.inspect.debug.single_device import loss_terms
from jtrain.inspect.debug.source import SourceLine
from jtrain.inspect.explain.operations import (
    find_line,
    format_aval,
    function_path,
    grouped_path,
    num_bytes,
    parse_scope,
    scope_in,
    without_repeats,
)
from jtrain.parallel.offload import device_shardings
from jtrain.train.program import Program


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """The programs of a loss over all rows of a batch; nothing is allocated for them."""

    loss: Any
    """The loss, as a closed jaxpr."""
    gradient: Any
    """The gradient of the loss by its parameters."""
    forward: Any
    """The forward pass of one microbatch; its outputs after the first are what it saves."""
    arguments: tuple[str, ...]
    """Names of the inputs of `forward`: `params/blocks/0/qkv/kernel`, `batch/tokens`."""
    rows: int
    """Rows of a microbatch."""


def trace_loss(program: Program) -> TracedLoss:
    """Trace the loss of a setup and its gradient, from shapes alone.

    Raises:
        LossError: if the loss has no gradient, or breaks its contract.
        DataError: if the first batch cannot be read.
    """
    like = device_shardings(program.resolved.abstract_state)
    of = lambda array, *dims: jax.ShapeDtypeStruct(dims, jax.dtypes.canonicalize_dtype(array.dtype))
    first = program.resolved.experiment.train[0]
    batch = {name: of(array, *array.shape) for name, array in first.items()}
    terms = loss_terms(program)

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        output = terms(params, extra, batch, key)
        return combine(output.terms)

    def forward(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        return jax.vjp(lambda params: loss(params, extra, batch, key), params)

    key = jax.eval_shape(TrainState.step_key, like)
    arguments = like.params, like.extra, batch, key
    rows = program.resolved.config.batch // program.resolved.config.microbatches
    few = {name: of(array, rows, *array.shape[1:]) for name, array in first.items()}
    named = {"params": like.params, "extra": like.extra, "batch": few, "key": key}
    names = [
        f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}".rstrip("/")
        for part, tree in named.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    plain = jax.make_jaxpr(loss)(*arguments)
    with user_code("the gradient of the loss"):
        try:
            gradient = jax.make_jaxpr(jax.grad(loss))(*arguments)
            saved = jax.make_jaxpr(forward)(like.params, like.extra, few, key)
        except ValueError as error:
            raise _explain_no_gradient(error) from error
    return TracedLoss(plain, gradient, saved, tuple(names), rows)


def _explain_no_gradient(error: ValueError) -> Exception:
    """Return what to do about a loop whose number of turns depends on the data."""
    if "everse-mode differentiation does not work" not in str(error):
        return error
    return LossError(
        "the loss has no gradient: it differentiates a loop whose number of turns depends on the "
        "data (jax.lax.while_loop, or fori_loop with traced bounds). Loop over a constant number "
        "of turns with jax.lax.scan and mask the turns that are too many, or take the loop out of "
        "the gradient by jax.lax.stop_gradient of its inputs."
    )


_COPIES = {"reshape", "squeeze", "sharding_constraint", "convert_element_type", "copy"}


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array that the forward pass saves."""

    kind: Literal["argument", "computed", "constant"]
    """argument: a parameter or the batch, which exists anyway; computed: it takes memory."""
    name: str
    """The argument's name, the name that `jax.ad_checkpoint.checkpoint_name` gave, or the
    operation that computes it."""
    array: str
    """Dtype and shape: `bfloat16[32,16,2048,4096]`."""
    bytes: int
    path: tuple[str, ...]
    """Modules around the operation that computes it."""
    source: SourceLine | None
    layers: int = 1
    """Layers of one kind, in a group; `bytes` are of all of them."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "kind": self.kind,
            "name": self.name,
            "array": self.array,
            "count": self.layers,
            "bytes": self.bytes,
            "module": "/".join(self.path),
            "source": str(self.source or ""),
        }


def list_residuals(forward: Any, arguments: Sequence[str]) -> list[Residual]:
    """Return what a forward pass saves, each array once, largest first.

    Args:
        forward: the closed jaxpr of a `jax.vjp`: its outputs after the first are what it saves.
    """
    inputs = [
        _Origin(name, dtype=x.dtype) for name, x in zip(arguments, forward.in_avals, strict=True)
    ]
    origins = _Origins().run(forward, inputs)
    saved = dict(zip(origins[1:], forward.out_avals[1:], strict=True))  # each once
    found = [_residual(origin, aval) for origin, aval in saved.items() if origin is not None]
    return sorted(found, key=lambda residual: -residual.bytes)


def group_residuals(residuals: Sequence[Residual]) -> list[Residual]:
    """Sum residuals that differ only in the layer that they come from; the largest first."""
    groups: dict[tuple[Any, ...], Residual] = {}
    for each in residuals:
        name, path = grouped_path(tuple(each.name.split("/"))), grouped_path(each.path)
        key = (each.kind, name, each.array, path, str(each.source))
        first = groups.get(key, dataclasses.replace(each, bytes=0, layers=0))
        groups[key] = dataclasses.replace(
            first,
            name="/".join(name),
            path=path,
            bytes=first.bytes + each.bytes,
            layers=first.layers + 1,
        )
    return sorted(groups.values(), key=lambda group: -group.bytes)


@dataclasses.dataclass(eq=False)
class _Origin:
    """The operation that computes a value, or the argument that it is."""

    name: str
    dtype: Any = None
    """Of the argument that the value is, or a copy of; None if it is computed."""
    path: tuple[str, ...] = ()
    equation: Any = None
    """None for an argument or a constant."""
    calls: tuple[Any, ...] = ()
    read: bool = True
    """False for what a turn of a scan gets, until an operation reads it."""


class _Origins(Interpreter[_Origin | None]):
    """Values with their origins; None is a number in the program."""

    def constant(self, value: Any, aval: Any) -> _Origin | None:
        return _Origin("a constant") if np.ndim(value) else None

    def join(self, *values: _Origin | None) -> _Origin | None:
        return values[0]

    def equation(self, equation: Any, inputs: list[_Origin | None]) -> Sequence[_Origin | None]:
        for origin in inputs:
            if origin is not None and not origin.read:  # the module that reads it first
                origin.read = True
                origin.path = without_repeats((*origin.path, *_first_scope(equation)))
        return super().equation(equation, inputs)

    def operation(self, equation: Any, inputs: list[_Origin | None]) -> Sequence[_Origin | None]:
        name, first = equation.primitive.name, inputs[0] if inputs else None
        if name in _COPIES and not self.calls and first is not None and first.dtype is not None:
            return [dataclasses.replace(first)]
        name = equation.params["name"] if name == "name" else name
        path = scope_in(self.calls, equation).path
        made = _Origin(name, None, path, equation, self.calls)
        return [dataclasses.replace(made) for _ in equation.outvars]

    def scan(self, equation: Any, turn: Any, carry: list[Any], rows: list[Any]) -> Sequence[Any]:
        """Evaluate the body once; what a turn gets is the input of the first operation on it.

        Layers with full rematerialization save their inputs so.
        """
        path = scope_in(self.calls[:-1], equation).path
        of = lambda kind: _Origin(kind, None, path, equation, self.calls[:-1], read=False)
        into = [of("input of a layer") for _ in carry], [of("slice of a layer") for _ in rows]
        return [x and dataclasses.replace(x) for x in turn(*into)]


def _residual(origin: _Origin, aval: Any) -> Residual:
    array, size = format_aval(aval), num_bytes(aval)
    if origin.dtype is not None:
        if origin.dtype == aval.dtype:
            return Residual("argument", origin.name, array, size, (), None)
        copied = f"copy of {origin.name} in {aval.dtype}"
        return Residual("computed", copied, array, size, ("copies of arguments",), None)
    if origin.equation is None:
        return Residual("constant", origin.name, array, size, (), None)
    source = find_line(origin.equation, origin.calls)
    path = origin.path or function_path(source)
    return Residual("computed", origin.name, array, size, path, source)


def _first_scope(reader: Any) -> tuple[str, ...]:
    """Return the module that reads a value first: the innermost one known."""
    found = [
        parse_scope(str(e.source_info.name_stack)).path for e in (reader, *equations_within(reader))
    ]
    return next((path for path in found if len(path) > 1), max(found, key=len))
