"""Blocks one after the other: written out, or stacked and scanned; recomputed where asked."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Params
from jtrain.models.layers.key_sequence import KeySequence

Remat: TypeAlias = Literal["none", "full", "dots", "dots_with_no_batch_dims", "names"]
# (block, x, what belongs to its rows, its index, what it kept before or None) -> x, what it keeps
Each: TypeAlias = Callable[[Any, Array, Any, Any, Any], tuple[Array, Any]]


def stacked(
    make: Callable[[KeySequence], nnx.Module], layers: int, draws: KeySequence
) -> nnx.Module:
    """`layers` modules as one, whose parameters have a leading dim: the layer.

    They draw what `make` would, called once for each after the other.
    """
    one = draws.fork()
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(one)))
    starts = one.start + one.count * jnp.arange(layers)
    states = jax.vmap(lambda start: nnx.split(make(draws.fork(start)))[1])(starts)
    draws.count += one.count * layers
    return nnx.merge(graph, states)


def through(
    blocks: nnx.Module,
    x: Float[Array, "b t d"],
    each: Each,
    *,
    rows: Any = None,
    kept: Sequence[Any] | Any = None,
    remat: Remat = "none",
    saved: Sequence[str] = (),
    place: Placement = Unplaced(),
) -> tuple[Float[Array, "b t d"], Any]:
    """`x` after every block, and what each kept: a list, or stacked as the blocks are.

    Args:
        blocks: an `nnx.List` of them, or one that `stacked` made.
        each: how a block is called.
        rows: arrays b ... that belong to the rows of `x`.
        kept: what each kept the last time, or None.
        remat: what the backward pass finds saved of a block; the rest is computed once more.
        saved: the names saved, where `remat` is `names`.
        place: where stacked blocks are, and where what is saved is.
    """
    if isinstance(blocks, nnx.List):
        each, after = _recomputed(each, remat, saved, place, prevent_cse=True), []
        for index, block in enumerate(blocks):
            x, keeps = each(block, x, rows, index, None if kept is None else kept[index])
            after.append(keeps)
        return x, after
    # A scan already keeps them apart.
    each = _recomputed(each, remat, saved, place, prevent_cse=False)
    graph, states = nnx.split(blocks)

    def one(layer, x, rows):
        state, index, keeps = layer
        return each(nnx.merge(graph, state), x, rows, index, keeps)

    layers = jax.tree.leaves(states)[0].shape[0]
    # What is kept from token to token stays with its layer: such rows do not travel.
    place = place if kept is None else Unplaced()
    return place.layers(one, (states, jnp.arange(layers), kept), x, rows)


def _recomputed(
    each: Each, remat: Remat, saved: Sequence[str], place: Placement, *, prevent_cse: bool
) -> Each:
    if remat == "none":
        return each
    policies = jax.checkpoint_policies
    policy = (
        place.saved(saved)
        if remat == "names"
        else {
            "full": policies.nothing_saveable,
            "dots": policies.dots_saveable,
            "dots_with_no_batch_dims": policies.dots_with_no_batch_dims_saveable,
        }[remat]
    )

    def call(block, x, rows, index, keeps):
        graph, state = nnx.split(block)
        run = lambda state, x, rows, keeps: each(nnx.merge(graph, state), x, rows, index, keeps)
        return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(state, x, rows, keeps)

    return call


def stack_layers(params: Params) -> Params:
    """The parameters of a transformer with `scan`, from those of one without."""
    blocks = [params["blocks"][str(i)] for i in range(len(params["blocks"]))]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def unstack_layers(params: Params) -> Params:
    """The parameters of a transformer without `scan`, from those of one with it."""
    layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], params["blocks"])
    return {**params, "blocks": {str(i): one(i) for i in range(layers)}}
