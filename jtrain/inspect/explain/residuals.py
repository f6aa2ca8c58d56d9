"""Traced programs of a loss, and what autodiff saves in the forward pass for the backward pass."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jtrain.core.jaxpr import inner_jaxprs, is_opaque, open_jaxpr, scan_sizes
from jtrain.core.loss import combine, normalize_loss
from jtrain.core.state import TrainState
from jtrain.errors import LossError
from jtrain.errors.user_code import user_code
from jtrain.inspect.debug.source import SourceLine
from jtrain.inspect.explain.operations import (
    find_line,
    format_aval,
    function_path,
    grouped_path,
    num_bytes,
    parse_scope,
    without_repeats,
)
from jtrain.parallel.offload import device_shardings
from jtrain.train.setup import TrainSetup


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


def trace_loss(setup: TrainSetup) -> TracedLoss:
    """Trace the loss of a setup and its gradient, from shapes alone.

    Raises:
        LossError: if the loss has no gradient, or breaks its contract.
        DataError: if the first batch cannot be read.
    """
    like = device_shardings(setup.like)
    of = lambda array, *dims: jax.ShapeDtypeStruct(dims, jax.dtypes.canonicalize_dtype(array.dtype))
    first = setup.experiment.train[0]
    batch = {name: of(array, *array.shape) for name, array in first.items()}
    # Without jit: the call would be inlined, and operations would lose their source lines.
    terms = inspect.unwrap(normalize_loss(setup.loss, ragged=setup.experiment.train.ragged))

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        output = terms(params, extra, batch, key)
        return combine(output.terms, [mean.weight for mean in output.terms.means])

    def forward(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        return jax.vjp(lambda params: loss(params, extra, batch, key), params)

    key = jax.eval_shape(TrainState.step_key, like)
    arguments = like.params, like.extra, batch, key
    rows = setup.config.batch // setup.config.microbatches
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


class ResidualGroup(NamedTuple):
    """Residuals that differ only in the layer that they come from."""

    residual: Residual
    layers: int

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.residual.bytes * self.layers


def list_residuals(forward: Any, arguments: Sequence[str]) -> list[Residual]:
    """Return what a forward pass saves, each array once, largest first.

    Args:
        forward: the closed jaxpr of a `jax.vjp`: its outputs after the first are what it saves.
        arguments: the names of its inputs.
    """
    jaxpr, _ = open_jaxpr(forward)
    names = dict(zip(jaxpr.invars, arguments, strict=True))
    saved = list(dict.fromkeys(x for x in jaxpr.outvars[1:] if not hasattr(x, "val")))
    found = [_residual(jaxpr, names, variable) for variable in saved]
    return sorted(found, key=lambda residual: -residual.bytes)


def group_residuals(residuals: Sequence[Residual]) -> list[ResidualGroup]:
    """Group residuals of the layers of a kind, the largest groups first."""
    groups: dict[tuple[Any, ...], list[Residual]] = {}
    for each in residuals:
        name = "/".join(grouped_path(tuple(each.name.split("/"))))
        key = (each.kind, name, each.array, grouped_path(each.path), str(each.source))
        groups.setdefault(key, []).append(dataclasses.replace(each, name=name, path=key[3]))
    found = [ResidualGroup(group[0], len(group)) for group in groups.values()]
    return sorted(found, key=lambda group: -group.bytes)


def _residual(jaxpr: Any, names: Mapping[Any, str], variable: Any) -> Residual:
    array, size = format_aval(variable.aval), num_bytes(variable.aval)
    root = _undo_copies(jaxpr, variable)
    if root in names:
        if root.aval.dtype == variable.aval.dtype:
            return Residual("argument", names[root], array, size, (), None)
        copied = f"copy of {names[root]} in {variable.aval.dtype}"
        return Residual("computed", copied, array, size, ("copies of arguments",), None)
    origin = _find_origin(jaxpr, variable, ())
    if origin is None:
        return Residual("constant", "a constant", array, size, (), None)
    source = find_line(origin.equation, origin.calls)
    path = origin.path or function_path(source)
    return Residual("computed", origin.name, array, size, path, source)


def _undo_copies(jaxpr: Any, variable: Any) -> Any:
    """Return the variable that `variable` is a copy of, in another shape, type or sharding."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while (eqn := producers.get(variable)) is not None and eqn.primitive.name in _COPIES:
        if hasattr(eqn.invars[0], "val"):
            break
        variable = eqn.invars[0]
    return variable


class _Origin(NamedTuple):
    name: str
    path: tuple[str, ...]
    equation: Any
    calls: tuple[Any, ...]


def _find_origin(jaxpr: Any, variable: Any, path: tuple[str, ...]) -> _Origin | None:
    """Return the operation that computes a variable, looking into the programs inside."""
    for eqn in jaxpr.eqns:
        if variable in eqn.outvars:
            return _origin_in(eqn, eqn.outvars.index(variable), path)
    return None


def _origin_in(eqn: Any, output: int, path: tuple[str, ...]) -> _Origin:
    scope = parse_scope(str(eqn.source_info.name_stack))
    path = without_repeats((*path, *scope.path))
    name = eqn.primitive.name
    programs = [] if is_opaque(name) else inner_jaxprs(eqn)
    if name == "name":
        return _Origin(eqn.params["name"], path, eqn, ())
    for program in programs:
        if len(program.outvars) != len(eqn.outvars):
            continue
        inside = program.outvars[output]
        if not hasattr(inside, "val") and (found := _find_origin(program, inside, path)):
            calls = (eqn, *found.calls) if "name" in eqn.params else found.calls
            return found._replace(calls=calls)
        if name == "scan":
            return _carried(eqn, program, inside, path)
    return _Origin(name, path, eqn, ())


def _carried(scan: Any, body: Any, variable: Any, path: tuple[str, ...]) -> _Origin:
    """Return a value that each turn of a scan gets: it is the input of the first operation on it.

    Layers with full rematerialization save their inputs so.
    """
    consts, carry = scan_sizes(scan, body)
    carried = variable in body.invars[consts : consts + carry]
    kind = "input of a layer" if carried else "slice of a layer"
    for reader in body.eqns:
        if any(atom is variable for atom in reader.invars):
            path = without_repeats((*path, *_first_scope(reader)))
            break
    return _Origin(kind, path, scan, ())


def _first_scope(reader: Any) -> tuple[str, ...]:
    """Return the module that reads a value first: the innermost one known."""
    inside = [eqn for program in inner_jaxprs(reader) for eqn in program.eqns]
    scopes = [parse_scope(str(eqn.source_info.name_stack)).path for eqn in (reader, *inside)]
    return next((found for found in scopes if len(found) > 1), max(scopes, key=len))
