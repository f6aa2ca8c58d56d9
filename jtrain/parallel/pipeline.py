"""Layers in stages: microbatches move from devices that have some layers to those of the next.

One program of named shardings. What is in the pipeline is an array whose first dim is the stage;
each turn all stages apply their layers at once, by `jax.vmap`, and then it rolls on by one stage.

With `repeats` a stage has that many runs of layers, apart from one another, and a microbatch goes
round that often. Microbatches enter in groups of as many as there are stages: in the turn in which
one of a group comes out, one of the next takes its place. So nothing waits in between, and stages
are idle for no more than `stages - 1` turns of all.

Outside, stages share the rows, as other axes do: embedding, head and loss are computed once.

Sources: Huang et al. 2018 (GPipe), https://arxiv.org/abs/1811.06965; Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2, for the repeats and groups; Xu et al. 2021 (GSPMD),
https://arxiv.org/abs/2105.04663, section 3.3, for the array that rolls.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jtrain.errors import ShardingError
from jtrain.parallel.schedule import Schedule
from jtrain.trees import at_least_f32
from jtrain.types import Layer, Params

STAGE = "stage"


class Split(NamedTuple):
    """How the rows of a microbatch are split."""

    copies: int  # of the layers and of their gradient
    parts: int  # of the rows of a copy
    axes: tuple[str, ...]  # of the copies
    mesh: Mesh


class Runs(NamedTuple):
    """The layers of the stages, s c r k ..., in runs of k."""

    weights: Any
    sums: Any  # of what is learned of them


Constrain = Callable[..., Array]  # (x, *dims)


def through_stages(
    schedule: Schedule,
    constrain: Constrain,
    layer: Layer,
    stack: Params,
    x: Float[Array, "b t d"],
    rows: Any,
    split: Split,
) -> tuple[Float[Array, "b t d"], Any]:
    """`x` after all layers, and what each gave; see `jtrain.types.Placement`.

    Args:
        constrain: lays an array out by the names of its dims.
        split: how the rows of a microbatch are.

    Raises:
        ShardingError: if the layers do not divide into stages, or the rows into microbatches.
    """
    _check(schedule, stack, len(x), split.copies * split.parts)
    numbers = jnp.arange(schedule.stages)
    runs = _with_sums(split, jax.tree.map(functools.partial(_by_stage, schedule, split), stack))

    def compute(runs, at, moving):
        """What a stage makes of what it has; `at`: turns since it got the first microbatch."""
        real = (at >= 0) & (at < schedule.batches * schedule.repeats)
        if schedule.repeats == 1:
            return _through(layer, _looked_up(runs.weights, runs.sums, (0, real)), *moving)
        opened, closed_over = _opened(layer, runs.weights, *moving)
        which = at // schedule.stages % schedule.repeats, real
        return _run(opened, runs.weights, runs.sums, which, closed_over, *moving)

    def turn(carry, number):
        waiting, (x, rows) = _exchange(schedule, number, *carry)
        at = number - numbers
        x, gave = jax.vmap(of_copies, spmd_axis_name=STAGE)(runs, at, placed((x, rows)))
        moving = jax.tree.map(functools.partial(_roll, by=1), (x, rows))
        return (waiting, placed(moving)), gave

    def placed(moving):
        x, rows = moving
        where = "stages", "copies", "batch"
        rows = jax.tree.map(lambda leaf: constrain(leaf, *where, *_none(leaf, 3)), rows)
        return constrain(x, *where, "time", "width"), rows

    of_copies = jax.vmap(compute, (0, None, 0), spmd_axis_name=split.axes or None)
    waiting = jax.tree.map(functools.partial(_home, schedule, split), (x, rows))
    # Until something real comes a stage computes on this, of which nothing is learned.
    moving = placed(jax.tree.map(lambda leaf: leaf[:, 0], jax.lax.stop_gradient(waiting)))
    turns = jnp.arange(schedule.turns)
    carry, gave = jax.lax.scan(turn, (waiting, moving), turns)
    (x, _), _ = _exchange(schedule, jnp.asarray(schedule.turns), *carry)
    x = constrain(_back(schedule, split, x), "rows", "time", "width")
    return x, jax.tree.map(functools.partial(_by_layer, schedule, split), gave)


def _exchange(schedule, turn, waiting, moving):
    """Where one comes out and one goes in, both in the place of the other."""
    exact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    swap = lambda *pair: (_swap if exact(pair[0]) else _swapped)(schedule, turn, *pair)
    both = jax.tree.map(swap, waiting, moving)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], moving, both)
    return pick(0), pick(1)


def _swapped(schedule, turn, waiting, moving):
    group, here, enters = _now(schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    # One moves to stage 0 as it is wanted there, and home again in as many turns.
    out = _only_if(enters, functools.partial(_moved, -1), jnp.where(here, moving, column))
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, out, group, 1)
    return waiting, jnp.where(here, column, moving)


def _swap_back(schedule, turn, grads):
    waiting, moving = grads
    group, here, enters = _now(schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    out = _only_if(enters, functools.partial(_moved, 1), column)
    column = jnp.where(here, moving, out)
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, column, group, 1)
    return None, waiting, jnp.where(here, out, moving)


def _now(schedule, turn, moving):
    """The group that enters, where it does, and whether one does."""
    whole = schedule.stages * schedule.repeats
    enters = True if schedule.repeats == 1 else turn % whole < schedule.stages
    first = (jnp.arange(schedule.stages) == 0).reshape(-1, *[1] * (moving.ndim - 1))
    return turn // whole, enters & first, enters


def _only_if(yes, move, x):
    return move(x) if yes is True else jax.lax.cond(yes, move, lambda x: x, x)


# Left to autodiff, it would keep its masks for every turn, as large as what they hide.
_swap = jax.custom_vjp(_swapped, nondiff_argnums=(0,))
_swap.defvjp(lambda how, turn, *x: (_swapped(how, turn, *x), turn), _swap_back)


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


def _home(schedule, split, leaf):
    """Rows, b ..., as s g+1 c n ...: where microbatches wait, each stage having its own rows.

    Those that come out take the place of the group after theirs; the last that enters is no group.
    """
    cut = (schedule.stages, split.copies, split.parts, schedule.groups, -1)
    leaf = leaf.reshape(*cut, *leaf.shape[1:])
    leaf = jnp.moveaxis(leaf, 3, 1)
    leaf = leaf.reshape(*leaf.shape[:3], -1, *leaf.shape[5:])
    return jnp.concatenate([leaf, jax.lax.stop_gradient(leaf[:, :1])], 1)


def _back(schedule, split, leaf):
    """The rows again, in their order."""
    leaf = leaf[:, 1:]
    leaf = leaf.reshape(*leaf.shape[:3], split.parts, -1, *leaf.shape[4:])
    return jnp.moveaxis(leaf, 1, 3).reshape(-1, *leaf.shape[5:])


def _by_layer(schedule, split, leaf):
    """What all stages gave in all turns, turns s c k n ..., as l b ...."""
    stages, repeats = schedule.stages, schedule.repeats
    of = lambda stage, leaf: jax.lax.dynamic_slice_in_dim(leaf, stage, schedule.batches * repeats)
    leaf = jax.vmap(of, (0, 1), spmd_axis_name=STAGE)(jnp.arange(stages), leaf)  # s turns c k n ...
    layers, rest = leaf.shape[3], leaf.shape[5:]
    entered = (schedule.groups, repeats, stages)  # turns
    leaf = leaf.reshape(stages, *entered, split.copies, layers, split.parts, -1, *rest)
    leaf = jnp.moveaxis(leaf, (2, 0, 5, 3, 4, 6, 1), range(7))
    return leaf.reshape(repeats * stages * layers, -1, *rest)


def _roll(x, by):
    """By one place: one permutation between devices."""
    return _rolled(by, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _moved(by, x)


def _moved(by, x):
    # Else the compiler cuts out the two parts where `x` is made, and sends each by itself.
    x = jax.lax.optimization_barrier(x)
    parts = [x[-1:], x[:-1]] if by > 0 else [x[1:], x[:1]]
    return jnp.concatenate(parts)


# Left to autodiff, its gradient would be two permutations and a sum.
_rolled = jax.custom_vjp(_moved, nondiff_argnums=(0,))
_rolled.defvjp(lambda by, x: (_moved(by, x), None), lambda by, _, grad: (_moved(-by, grad),))


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
    return Runs(pick(0), jax.tree.map(functools.partial(_placed, split), pick(1)))


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


def _none(leaf, dims):
    return (None,) * (leaf.ndim - dims)


def _check(schedule, stack, rows, parts):
    layers, stages = len(jax.tree.leaves(stack)[0]), schedule.stages
    whole = stages * schedule.repeats
    if layers % whole:
        fits = [n for n in range(1, layers + 1) if layers % (n * schedule.repeats) == 0]
        near = min(fits, key=lambda n: abs(n - stages), default=1)
        asked = f"parallel.stage={stages}"
        asked += f" x parallel.repeats={schedule.repeats}" if schedule.repeats > 1 else ""
        lower = max(layers // whole, 1) * whole
        raise ShardingError(
            f"{layers} layers do not divide into {asked}. Nearest: parallel.stage={near}"
            f"{'' if fits else ' parallel.repeats=1'}, or model.layers={lower}."
        )
    unit = parts * schedule.batches
    if rows % unit:
        raise ShardingError(
            f"{rows} rows do not divide into {schedule.batches} microbatches of the pipeline x "
            f"{parts} parts = {unit}. Nearest: {-(-rows // unit) * unit} rows, by batch (and "
            f"evaluate.batch) over microbatches; or parallel.stage_batches={stages}."
        )
