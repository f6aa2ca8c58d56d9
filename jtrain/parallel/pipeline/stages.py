"""The layers of a pipeline in runs: of which a stage has one, or several apart from one another.

What is learned of the weights is summed over turns in at least float32. A run that is looked up is
not kept for the way back, but looked up again.
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
    """How the rows of a microbatch are split."""

    copies: int  # of the layers and of their gradient
    parts: int  # of the rows of a copy
    axes: tuple[str, ...]  # of the copies
    mesh: Mesh


class StageLayers(NamedTuple):
    """The layers of the stages, s c r k ..., in runs of k."""

    weights: Any
    sums: Any  # of what is learned of them


def runs_of(schedule: PipelineSchedule, split: RowSplit, stack: Params) -> StageLayers:
    """The layers of all stages, l ... as s c r k ..., and where what is learned of them adds up."""
    return _with_sums(split, jax.tree.map(functools.partial(_by_stage, schedule, split), stack))


def through_run(
    repeats: int, layer: Layer, runs: StageLayers, repeat: Any, real: Any, x: Any, rows: Any
) -> tuple[Any, Any]:
    """`x` after the layers of one run of a stage, r k ..., and what each gave.

    Nothing is learned of the run where what it computes on is not `real`.
    """
    if repeats == 1:
        return _through(layer, _looked_up(runs.weights, runs.sums, (0, real)), x, rows)
    opened, closed_over = _opened(layer, runs.weights, x, rows)
    return _run(opened, runs.weights, runs.sums, (repeat, real), closed_over, x, rows)


def _by_stage(schedule, split, leaf):
    """Leaves of layers, l ..., as s c r k ...: of each stage its runs of k layers.

    Each copy has its own, so that gradients are summed over them once and not every turn.
    """
    runs = leaf.reshape(schedule.repeats, schedule.stages, -1, *leaf.shape[1:])
    runs = jnp.moveaxis(runs, 1, 0)[:, None]
    return _placed(split, jnp.broadcast_to(runs, (len(runs), split.copies, *runs.shape[2:])))


def _placed(split, runs):
    rest = [P.UNCONSTRAINED] * (runs.ndim - 2)
    where = NamedSharding(split.mesh, P(STAGE, split.axes or None, *rest))
    return jax.lax.with_sharding_constraint(runs, where)


def _through(layer, run, x, rows):
    """`x` after the layers of a run, and what each gave."""
    return jax.lax.scan(lambda x, one: layer(one, x, rows), x, run)


def _with_sums(split, weights):
    """Weights, and zeros: what is learned of the weights is the gradient of these.

    So it is summed over turns in at least float32, whatever the weights are in.
    """
    apart = lambda leaf: _apart(leaf) if _inexact(leaf) else (leaf, leaf)
    both = jax.tree.map(apart, weights)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], weights, both)
    return StageLayers(pick(0), jax.tree.map(functools.partial(_placed, split), pick(1)))


@jax.custom_vjp
def _apart(leaf):
    return leaf, jnp.zeros(leaf.shape, at_least_f32(leaf[:0]).dtype)


_apart.defvjp(
    lambda leaf: (_apart(leaf), leaf[:0]), lambda none, grads: (grads[1].astype(none.dtype),)
)


def _looked_up(weights, sums, which):
    """A run; its gradient is 0, and not 0 x NaN, where what is computed by it is not real."""
    repeat, real = which
    learned = lambda leaf, zero: _learned(leaf[repeat], zero[repeat], real)
    return jax.tree.map(
        lambda leaf, zero: learned(leaf, zero) if _inexact(leaf) else leaf[repeat], weights, sums
    )


def _inexact(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.custom_vjp
def _learned(x, zero, real):
    del zero, real
    return x


def _learned_back(kept, grad):
    real, none = kept
    return None, jnp.where(real, grad, jnp.zeros_like(grad)).astype(none.dtype), None


_learned.defvjp(lambda x, zero, real: (x, (real, zero[:0])), _learned_back)


def _opened(layer, weights, x, rows):
    """`layer` with what it closes over as its first argument, and that."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), weights)
    jaxpr, like = jax.make_jaxpr(layer, return_shape=True)(one, x, rows)

    def opened(closed_over, *given):
        flat = eval_jaxpr(jaxpr.jaxpr, closed_over, *jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(like), flat)

    return opened, jaxpr.consts


# Left to autodiff, the run that a turn looks up would be kept for the way back, for every turn.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(opened, weights, sums, which, closed_over, x, rows):
    """`x` after the layers of one of several runs, which is looked up again on the way back."""
    return _of_run(opened, _looked_up(weights, sums, which), closed_over, x, rows)


def _of_run(opened, run, closed_over, x, rows):
    return _through(functools.partial(opened, closed_over), run, x, rows)


def _run_forward(opened, weights, sums, which, *given):
    of_run = functools.partial(_of_run, opened)
    gave, back = jax.vjp(of_run, _looked_up(weights, sums, which), *given)
    return gave, (_with_run(back, None), weights, sums, which)


def _run_back(opened, kept, grads):
    del opened
    back, weights, sums, which = kept
    run, put = jax.vjp(lambda sums: _looked_up(weights, sums, which), sums)
    grad_run, *grads = _with_run(back, run)(grads)
    return None, *put(grad_run), None, *grads


def _with_run(back: Any, run: Any) -> Any:
    """`back` with this in the place of what it keeps of its first argument.

    Source: https://docs.jax.dev/en/latest/301/vjp-objects.html.
    """
    back.args_res = [run, *back.args_res[1:]]
    return back


_run.defvjp(_run_forward, _run_back)
