"""Layers of pipeline stages, in one run or several runs a stage.

Gradients of the weights are summed over turns in at least float32. An indexed run is not saved for
the backward pass, but indexed again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.core.placement import Layer
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Params
from jtrain.parallel.pipeline.schedule import PipelineSchedule

STAGE = "stage"


class RowSplit(NamedTuple):
    """Split of the rows of a microbatch."""

    copies: int  # replicas of the layers and of their gradient
    parts: int  # shards of the rows of a replica
    axes: tuple[str, ...]  # of the replicas
    mesh: Mesh


class StageLayers(NamedTuple):
    """The layers of the stages, s c r k ..., in runs of k."""

    weights: Any
    sums: Any  # their gradients are those of the weights


def stack_stages(schedule: PipelineSchedule, split: RowSplit, stack: Params) -> StageLayers:
    """Return the layers of all stages, l ... as s c r k ..., with sums for their gradients."""
    return _with_sums(split, jax.tree.map(functools.partial(_by_stage, schedule, split), stack))


def through_run(
    repeats: int, layer: Layer, runs: StageLayers, repeat: Any, real: Any, x: Any, rows: Any
) -> tuple[Any, Any]:
    """Return `x` after the layers of one run of a stage, r k ..., and the layers' outputs.

    The gradient of the run is 0 where its input is not `real`.
    """
    if repeats == 1:
        return _scan_layers(layer, _index_run(runs.weights, runs.sums, (0, real)), x, rows)
    closed, closed_over = _close_over(layer, runs.weights, x, rows)
    return _run(closed, runs.weights, runs.sums, (repeat, real), closed_over, x, rows)


def _by_stage(schedule, split, leaf):
    """Reshape leaves l ... to s c r k ...: the runs of k layers of each stage.

    Each replica has its own, so that gradients are summed over replicas once, not every turn.
    """
    runs = leaf.reshape(schedule.repeats, schedule.stages, -1, *leaf.shape[1:])
    runs = jnp.moveaxis(runs, 1, 0)[:, None]
    return _constrain(split, jnp.broadcast_to(runs, (len(runs), split.copies, *runs.shape[2:])))


def _constrain(split, runs):
    rest = [P.UNCONSTRAINED] * (runs.ndim - 2)
    sharding = NamedSharding(split.mesh, P(STAGE, split.axes or None, *rest))
    return jax.lax.with_sharding_constraint(runs, sharding)


def _scan_layers(layer, run, x, rows):
    return jax.lax.scan(lambda x, params: layer(params, x, rows), x, run)


def _with_sums(split, weights):
    """Return the weights, and zeros whose gradient is that of the weights.

    So gradients are summed over turns in at least float32, whatever the weights' dtype.
    """
    pair = lambda leaf: _with_zeros(leaf) if _inexact(leaf) else (leaf, leaf)
    both = jax.tree.map(pair, weights)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], weights, both)
    return StageLayers(pick(0), jax.tree.map(functools.partial(_constrain, split), pick(1)))


@jax.custom_vjp
def _with_zeros(leaf):
    return leaf, jnp.zeros(leaf.shape, at_least_f32(leaf[:0]).dtype)


_with_zeros.defvjp(
    lambda leaf: (_with_zeros(leaf), leaf[:0]),
    lambda empty, grads: (grads[1].astype(empty.dtype),),
)


def _index_run(weights, sums, which):
    """Return a run; its gradient is 0, and not 0 x NaN, where its input is not real."""
    repeat, real = which
    index = lambda leaf, zero: _mask_gradient(leaf[repeat], zero[repeat], real)
    return jax.tree.map(
        lambda leaf, zero: index(leaf, zero) if _inexact(leaf) else leaf[repeat], weights, sums
    )


def _inexact(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.custom_vjp
def _mask_gradient(x, zero, real):
    del zero, real
    return x


def _mask_gradient_back(saved, grad):
    real, empty = saved
    return None, jnp.where(real, grad, jnp.zeros_like(grad)).astype(empty.dtype), None


_mask_gradient.defvjp(lambda x, zero, real: (x, (real, zero[:0])), _mask_gradient_back)


def _close_over(layer, weights, x, rows):
    """Return `layer` with its closed-over arrays as first argument, and these arrays."""
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), weights)
    jaxpr, like = jax.make_jaxpr(layer, return_shape=True)(params, x, rows)

    def closed(closed_over, *args):
        flat = eval_jaxpr(jaxpr.jaxpr, closed_over, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(like), flat)

    return closed, jaxpr.consts


# Autodiff would save the indexed run of every turn for the backward pass.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(closed, weights, sums, which, closed_over, x, rows):
    """Apply one of several runs, which the backward pass indexes again."""
    return _apply_run(closed, _index_run(weights, sums, which), closed_over, x, rows)


def _apply_run(closed, run, closed_over, x, rows):
    return _scan_layers(functools.partial(closed, closed_over), run, x, rows)


def _run_forward(closed, weights, sums, which, *args):
    apply_run = functools.partial(_apply_run, closed)
    outputs, vjp = jax.vjp(apply_run, _index_run(weights, sums, which), *args)
    return outputs, (_with_run(vjp, None), weights, sums, which)


def _run_back(closed, saved, grads):
    del closed
    vjp, weights, sums, which = saved
    run, run_vjp = jax.vjp(lambda sums: _index_run(weights, sums, which), sums)
    grad_run, *grads = _with_run(vjp, run)(grads)
    return None, *run_vjp(grad_run), None, *grads


def _with_run(vjp: Any, run: Any) -> Any:
    """Return `vjp` with `run` as the residual of its first argument.

    Source: https://docs.jax.dev/en/latest/301/vjp-objects.html.
    """
    vjp.args_res = [run, *vjp.args_res[1:]]
    return vjp


_run.defvjp(_run_forward, _run_back)
