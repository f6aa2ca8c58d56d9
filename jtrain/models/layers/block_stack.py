"""Stacks of blocks: a list of modules or one scanned module, with rematerialization."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Params
from jtrain.models.layers.dropout import KeySequence

Remat: TypeAlias = Literal["none", "full", "dots", "dots_with_no_batch_dims", "names"]
# (block, x, arrays of the rows, index, state or None) -> x, state
CallBlock: TypeAlias = Callable[[Any, Array, Any, Any, Any], tuple[Array, Any]]


def stack_modules(
    make: Callable[[KeySequence], nnx.Module], layers: int, draws: KeySequence
) -> nnx.Module:
    """Make `layers` modules as one whose parameters have a leading dim, the layer.

    The initial values are those of modules that `make` makes one after the other.
    """
    fork = draws.fork()
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(fork)))
    starts = fork.start + fork.count * jnp.arange(layers)
    states = jax.vmap(lambda start: nnx.split(make(draws.fork(start)))[1])(starts)
    draws.count += fork.count * layers
    return nnx.merge(graph, states)


def through(
    blocks: nnx.Module,
    x: Float[Array, "b t d"],
    call_block: CallBlock,
    *,
    rows: Any = None,
    state: Sequence[Any] | Any = None,
    remat: Remat = "none",
    saved: Sequence[str] = (),
    placement: Placement = Unplaced(),
) -> tuple[Float[Array, "b t d"], Any]:
    """Return `x` after every block, and the blocks' new states: a list, or stacked as they are.

    Args:
        blocks: an `nnx.List` of blocks, or a module from `stack_modules`.
        rows: arrays b ... that belong to the rows of `x`.
        state: the blocks' states, such as caches, or None.
        remat: what the forward pass saves of a block; the backward pass recomputes the rest.
        saved: the names saved, where `remat` is `names`.
        placement: of stacked blocks, and of the saved arrays.
    """
    if isinstance(blocks, nnx.List):
        call_block, states = _remat(call_block, remat, saved, placement, prevent_cse=True), []
        for index, block in enumerate(blocks):
            x, new = call_block(block, x, rows, index, None if state is None else state[index])
            states.append(new)
        return x, states
    # A scan already prevents common subexpressions.
    call_block = _remat(call_block, remat, saved, placement, prevent_cse=False)
    graph, params = nnx.split(blocks)

    def layer(slices, x, rows):
        params, index, state = slices
        return call_block(nnx.merge(graph, params), x, rows, index, state)

    layers = jax.tree.leaves(params)[0].shape[0]
    # A cache stays on the devices of its layer, so rows with caches do not go through a pipeline.
    placement = placement if state is None else Unplaced()
    return placement.layers(layer, (params, jnp.arange(layers), state), x, rows)


def _remat(
    call_block: CallBlock,
    remat: Remat,
    saved: Sequence[str],
    placement: Placement,
    *,
    prevent_cse: bool,
) -> CallBlock:
    """Return `call_block`, rematerialized by the policy that `remat` names."""
    if remat == "none":
        return call_block
    policies = jax.checkpoint_policies
    policy = (
        placement.saved(saved)
        if remat == "names"
        else {
            "full": policies.nothing_saveable,
            "dots": policies.dots_saveable,
            "dots_with_no_batch_dims": policies.dots_with_no_batch_dims_saveable,
        }[remat]
    )

    def call(block, x, rows, index, state):
        graph, params = nnx.split(block)

        def run(params, x, rows, state):
            return call_block(nnx.merge(graph, params), x, rows, index, state)

        return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(params, x, rows, state)

    return call


def unstack_layers(params: Params) -> Params:
    """Return the parameters of a transformer without `scan` from those of one with `scan`."""
    layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    block = lambda i: jax.tree.map(lambda leaf: leaf[i], params["blocks"])
    return {**params, "blocks": {str(i): block(i) for i in range(layers)}}
