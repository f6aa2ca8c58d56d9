"""Pipeline parallelism: microbatches move from the devices of one stage to those of the next.

One program with named shardings. The microbatches in the pipeline are an array whose first dim is
the stage; each turn all stages apply their layers at once, by `jax.vmap`, and then the array rolls
by one stage.

With `repeats` a stage has several runs of layers, and a microbatch goes round that many times.
Microbatches enter in groups of as many as there are stages: when a microbatch of one group leaves,
one of the next group takes its place. So no microbatch waits, and stages are idle for at most
`stages - 1` turns.

Outside of the layers, stages split the rows as other axes do: embedding, head and loss are computed
once.

Sources: Huang et al. 2018 (GPipe), https://arxiv.org/abs/1811.06965; Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2, for the repeats and groups; Xu et al. 2021 (GSPMD),
https://arxiv.org/abs/2105.04663, section 3.3, for the rolling array.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.placement import Layer
from jtrain.core.types import Params
from jtrain.errors import ShardingError
from jtrain.parallel.pipeline.exchange import ExchangePlan, exchange, roll
from jtrain.parallel.pipeline.schedule import PipelineSchedule
from jtrain.parallel.pipeline.stages import STAGE, RowSplit, stack_stages, through_run

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
        split: the split of the rows of a microbatch.

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

    A leaving microbatch takes the place of the next group; the last entering one is no group.
    """
    cut = (schedule.stages, split.copies, split.parts, schedule.groups, -1)
    leaf = leaf.reshape(*cut, *leaf.shape[1:])
    leaf = jnp.moveaxis(leaf, 3, 1)
    leaf = leaf.reshape(*leaf.shape[:3], -1, *leaf.shape[5:])
    return jnp.concatenate([leaf, jax.lax.stop_gradient(leaf[:, :1])], 1)


def _from_stages(schedule, split, leaf):
    """Undo `_to_stages`."""
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
