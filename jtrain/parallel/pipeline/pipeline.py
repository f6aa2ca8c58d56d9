"""Pipeline parallelism: microbatches move from the devices of one stage to those of the next.

One program with named shardings. The microbatches in the pipeline are an array whose first dim is
the stage; each turn all stages apply their layers at once, by `jax.vmap`, and then the array rolls
by one stage.

With `repeats` a stage has several runs of layers, and a microbatch goes round that many times.
Microbatches enter in groups of as many as there are stages: when a microbatch of one group leaves,
one of the next group takes its place. So no microbatch waits, and stages are idle for at most
`stages - 1` turns.

The gradients of the exchange are written out: autodiff would make twice as many permutations, and
save masks for every turn.

Outside of the layers, stages split the rows as other axes do: embedding, head and loss are computed
once.

Sources: Huang et al. 2018 (GPipe), https://arxiv.org/abs/1811.06965; Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2, for the repeats and groups; Xu et al. 2021 (GSPMD),
https://arxiv.org/abs/2105.04663, section 3.3, for the rolling array.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.placement import Layer
from jtrain.core.types import Params
from jtrain.errors import ShardingError
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.pipeline.stages import STAGE, RowSplit, stack_stages, through_run


class ExchangePlan(NamedTuple):
    """Schedule of the entering microbatches, and the handling of turns without one."""

    schedule: PipelineSchedule
    skips: bool  # such a turn sends nothing, by a branch


def exchange(plan: ExchangePlan, turn: Any, waiting: Any, moving: Any) -> tuple[Any, Any]:
    """Swap the microbatch that leaves with the one that enters."""
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    swap = lambda *pair: (_swap if inexact(pair[0]) else _swapped)(plan, turn, *pair)
    both = jax.tree.map(swap, waiting, moving)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], moving, both)
    return pick(0), pick(1)


def _swapped(plan, turn, waiting, moving):
    group, here, enters = _turn(plan.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    # A microbatch moves to stage 0 when needed, and back in as many turns.
    out = _move_if(plan, enters, functools.partial(_moved, -1), jnp.where(here, moving, column))
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, out, group, 1)
    return waiting, jnp.where(here, column, moving)


def _swap_back(plan, turn, grads):
    waiting, moving = grads
    group, here, enters = _turn(plan.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    out = _move_if(plan, enters, functools.partial(_moved, 1), column)
    column = jnp.where(here, moving, out)
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, column, group, 1)
    return None, waiting, jnp.where(here, out, moving)


def _turn(schedule, turn, moving):
    """Return the group of the turn, a mask of the entering stage, and whether one enters."""
    period = schedule.stages * schedule.repeats
    enters = True if schedule.repeats == 1 else turn % period < schedule.stages
    first = (jnp.arange(schedule.stages) == 0).reshape(-1, *[1] * (moving.ndim - 1))
    return turn // period, enters & first, enters


def _move_if(plan, enters, move, x):
    if enters is True:
        return move(x)
    return (
        jax.lax.cond(enters, move, lambda x: x, x) if plan.skips else jnp.where(enters, move(x), x)
    )


# Autodiff would save masks as large as the arrays for every turn.
_swap = jax.custom_vjp(_swapped, nondiff_argnums=(0,))
_swap.defvjp(lambda plan, turn, *x: (_swapped(plan, turn, *x), turn), _swap_back)


def roll(x: Any, by: int) -> Any:
    """Roll by one stage, with one permutation between devices."""
    return _rolled(by, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _moved(by, x)


def _moved(by, x):
    # Without a barrier the compiler makes the two parts of `x` separately and sends each.
    x = jax.lax.optimization_barrier(x)
    parts = [x[-1:], x[:-1]] if by > 0 else [x[1:], x[:1]]
    return jnp.concatenate(parts)


# By autodiff the gradient would be two permutations and a sum.
_rolled = jax.custom_vjp(_moved, nondiff_argnums=(0,))
_rolled.defvjp(lambda by, x: (_moved(by, x), None), lambda by, _, grad: (_moved(-by, grad),))


Constrain = Callable[..., Array]  # (x, *dims)


def through_stages(
    schedule: PipelineSchedule,
    constrain: Constrain,
    layer: Layer,
    stack: Params,
    x: Float[Array, "b t d"],
    rows: Any,
    split: RowSplit,
) -> tuple[Float[Array, "b t d"], Any]:
    """Return `x` after all layers, and the layers' outputs; see `jtrain.core.placement.Placement`.

    Args:
        constrain: constrains an array by the names of its dims.

    Raises:
        ShardingError: if the layers do not divide into stages, or the rows into microbatches.
    """
    _check(schedule, stack, len(x), split.copies * split.parts)
    numbers = jnp.arange(schedule.stages)
    runs = stack_stages(schedule, split, stack)
    # A CPU runs a branch concurrently with the code after it: permutations in another order on each
    # device take all threads, and deadlock (docs/decisions.md).
    plan = ExchangePlan(schedule, skips=split.mesh.devices.flat[0].platform != "cpu")

    def compute(runs, at, moving):
        """Apply a stage; `at` is the number of turns since the stage got the first microbatch."""
        real = (at >= 0) & (at < schedule.batches * schedule.repeats)
        repeat = at // schedule.stages % schedule.repeats
        return through_run(schedule.repeats, layer, runs, repeat, real, *moving)

    def turn(carry, number):
        waiting, (x, rows) = exchange(plan, number, *carry)
        at = number - numbers
        x, outputs = jax.vmap(of_copies, spmd_axis_name=STAGE)(runs, at, placed((x, rows)))
        moving = jax.tree.map(functools.partial(roll, by=1), (x, rows))
        return (waiting, placed(moving)), outputs

    def placed(moving):
        x, rows = moving
        dims = "stages", "copies", "batch"
        rows = jax.tree.map(lambda leaf: constrain(leaf, *dims, *_none(leaf, 3)), rows)
        return constrain(x, *dims, "time", "width"), rows

    of_copies = jax.vmap(compute, (0, None, 0), spmd_axis_name=split.axes or None)
    waiting = jax.tree.map(functools.partial(_to_stages, schedule, split), (x, rows))
    # Until the first microbatch arrives a stage computes on these rows, without a gradient.
    moving = placed(jax.tree.map(lambda leaf: leaf[:, 0], jax.lax.stop_gradient(waiting)))
    turns = jnp.arange(schedule.turns)
    carry, outputs = jax.lax.scan(turn, (waiting, moving), turns)
    (x, _), _ = exchange(plan, jnp.asarray(schedule.turns), *carry)
    x = constrain(_from_stages(schedule, split, x), "rows", "time", "width")
    return x, jax.tree.map(functools.partial(_by_layer, schedule, split), outputs)


def _to_stages(schedule, split, leaf):
    """Reshape rows b ... to s g+1 c n ...: waiting microbatches, each stage with its own rows.

    A leaving microbatch takes the place of the next group; the last entering one is not a group.
    """
    cut = (schedule.stages, split.copies, split.parts, schedule.groups, -1)
    leaf = leaf.reshape(*cut, *leaf.shape[1:])
    leaf = jnp.moveaxis(leaf, 3, 1)
    leaf = leaf.reshape(*leaf.shape[:3], -1, *leaf.shape[5:])
    return jnp.concatenate([leaf, jax.lax.stop_gradient(leaf[:, :1])], 1)


def _from_stages(schedule, split, leaf):
    leaf = leaf[:, 1:]
    leaf = leaf.reshape(*leaf.shape[:3], split.parts, -1, *leaf.shape[4:])
    return jnp.moveaxis(leaf, 1, 3).reshape(-1, *leaf.shape[5:])


def _by_layer(schedule, split, leaf):
    """Reshape the outputs of all turns and stages, turns s c k n ..., to l b ...."""
    stages, repeats = schedule.stages, schedule.repeats
    select = lambda stage, leaf: jax.lax.dynamic_slice_in_dim(
        leaf, stage, schedule.batches * repeats
    )
    leaf = jax.vmap(select, (0, 1), spmd_axis_name=STAGE)(
        jnp.arange(stages), leaf
    )  # s turns c k n ...
    layers, rest = leaf.shape[3], leaf.shape[5:]
    entered = (schedule.groups, repeats, stages)  # turns
    leaf = leaf.reshape(stages, *entered, split.copies, layers, split.parts, -1, *rest)
    leaf = jnp.moveaxis(leaf, (2, 0, 5, 3, 4, 6, 1), range(7))
    return leaf.reshape(repeats * stages * layers, -1, *rest)


def _none(leaf, dims):
    return (None,) * (leaf.ndim - dims)


def _check(schedule, stack, rows, parts):
    layers, stages = len(jax.tree.leaves(stack)[0]), schedule.stages
    unit = stages * schedule.repeats
    if layers % unit:
        fits = [n for n in range(1, layers + 1) if layers % (n * schedule.repeats) == 0]
        near = min(fits, key=lambda n: abs(n - stages), default=1)
        layout = f"parallel.stage={stages}"
        layout += f" x parallel.repeats={schedule.repeats}" if schedule.repeats > 1 else ""
        lower = max(layers // unit, 1) * unit
        raise ShardingError(
            f"{layers} layers do not divide into {layout}. Nearest: parallel.stage={near}"
            f"{'' if fits else ' parallel.repeats=1'}, or model.layers={lower}."
        )
    unit = parts * schedule.batches
    if rows % unit:
        raise ShardingError(
            f"{rows} rows do not divide into {schedule.batches} microbatches of the pipeline x "
            f"{parts} shards = {unit}. Nearest: {-(-rows // unit) * unit} rows, by batch (and "
            f"evaluate.batch) over microbatches; or parallel.stage_batches={stages}."
        )
