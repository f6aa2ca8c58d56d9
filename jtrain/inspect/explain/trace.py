"""Traced programs of a config: its loss, the gradient, and the forward pass with what it saves."""

import dataclasses
import inspect
from typing import Any

import jax

from jtrain.core.loss import combine, normalize_loss
from jtrain.core.state import TrainState
from jtrain.errors import LossError
from jtrain.errors.user_code import user_code
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
    batch = {name: _shape(array) for name, array in setup.experiment.train[0].items()}
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
    few = {name: _first_rows(array, rows) for name, array in batch.items()}
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


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _first_rows(like: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *like.shape[1:]), like.dtype)
