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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.errors import ConfigError, ShardingError
from jtrain.types import Layer, Tree

STAGE = "stage"
Constrain = Callable[..., Array]  # (x, *dims)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which stage computes what in which turn.

    What enters in turn u is at stage s in turn u + s, and again `stages` turns later if it goes
    round once more.
    """

    stages: int
    batches: int  # microbatches, a multiple of the stages
    repeats: int = 1

    @property
    def groups(self) -> int:
        """Groups of as many microbatches as there are stages."""
        return self.batches // self.stages

    @property
    def turns(self) -> int:
        """How often all stages compute."""
        return self.batches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the turns in which a stage computes nothing of use."""
        return (self.stages - 1) / self.turns

    def __str__(self) -> str:
        often = "" if self.repeats == 1 else f", {self.repeats} times round"
        return (
            f"pipeline: {self.batches} microbatches through {self.stages} stages{often}: "
            f"idle {self.stages - 1} of {self.turns} turns, {self.bubble:.1%}"
        )


def schedule_of(stages: int, batches: int, repeats: int) -> Schedule | None:
    """The schedule for these values of `Axes`; None where there is one stage.

    Raises:
        ConfigError: if they do not fit together.
    """
    if stages == 1:
        for name, value, plain in (("stage_batches", batches, 0), ("repeats", repeats, 1)):
            if value != plain:
                raise ConfigError(
                    f"parallel.{name}={value} is of a pipeline, and parallel.stage=1 is none. Set "
                    f"parallel.stage=2 or more, or parallel.{name}={plain}."
                )
        return None
    if batches % stages:
        near = max(round(batches / stages), 1) * stages
        raise ConfigError(
            f"parallel.stage_batches={batches} microbatches enter in groups of parallel.stage="
            f"{stages}, which does not divide them. Nearest: parallel.stage_batches={near}."
        )
    return Schedule(stages, batches or stages, repeats)


def through_stages(
    schedule: Schedule,
    constrain: Constrain,
    layer: Layer,
    stack: Tree,
    x: Float[Array, "b t d"],
    rows: Any,
    *,
    parts: int,
) -> tuple[Float[Array, "b t d"], Any]:
    """`x` after all layers, and what each gave; see `jtrain.types.Placement`.

    Args:
        constrain: lays an array out by the names of its dims.
        parts: how many parts the rows of a microbatch are in.

    Raises:
        ShardingError: if the layers do not divide into stages, or the rows into microbatches.
    """
    _check(schedule, stack, len(x), parts)
    numbers = jnp.arange(schedule.stages)
    runs = jax.tree.map(functools.partial(_by_stage, schedule), stack)

    def compute(runs, at, moving):
        """What a stage makes of what it has; `at`: turns since it got the first microbatch."""
        real = (at >= 0) & (at < schedule.batches * schedule.repeats)
        run = jax.tree.map(lambda leaf: leaf[at // schedule.stages % schedule.repeats], runs)
        x, rows = moving
        return jax.lax.scan(lambda x, one: layer(one, x, rows), x, _learned_from(run, real))

    def turn(carry, number):
        waiting, (x, rows) = _exchange(schedule, number, *carry)
        at = number - numbers
        x, gave = jax.vmap(compute, spmd_axis_name=STAGE)(runs, at, placed((x, rows)))
        moving = jax.tree.map(functools.partial(_roll, by=1), (x, rows))
        return (waiting, placed(moving)), gave

    def placed(moving):
        x, rows = moving
        rows = jax.tree.map(lambda leaf: constrain(leaf, "stages", "batch", *_none(leaf, 2)), rows)
        return constrain(x, "stages", "batch", "time", "width"), rows

    waiting = jax.tree.map(lambda leaf: _home(schedule, leaf, parts), (x, rows))
    # Until something real comes a stage computes on this, of which nothing is learned.
    moving = placed(jax.tree.map(lambda leaf: leaf[:, 0], jax.lax.stop_gradient(waiting)))
    turns = jnp.arange(schedule.turns)
    carry, gave = jax.lax.scan(turn, (waiting, moving), turns)
    (x, _), _ = _exchange(schedule, jnp.asarray(schedule.turns), *carry)
    x = constrain(_back(schedule, x, parts), "rows", "time", "width")
    return x, jax.tree.map(functools.partial(_by_layer, schedule, parts), gave)


def _exchange(schedule, turn, waiting, moving):
    """Where one comes out and one goes in, both in the place of the other."""
    stages, whole = schedule.stages, schedule.stages * schedule.repeats
    group, enters = turn // whole, turn % whole < stages

    def each(waiting, moving):
        column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
        here = enters & (jnp.arange(stages) == 0).reshape(-1, *[1] * (moving.ndim - 1))
        out = jnp.where(here, moving, column)
        back = functools.partial(_roll, by=-1)
        # One moves to stage 0 as it is wanted there, and home again in as many turns.
        out = back(out) if whole == stages else jax.lax.cond(enters, back, lambda x: x, out)
        after = jax.lax.dynamic_update_index_in_dim(waiting, out, group, 1)
        return after, jnp.where(here, column, moving)

    both = jax.tree.map(each, waiting, moving)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], moving, both)
    return pick(0), pick(1)


def _by_stage(schedule, leaf):
    """Leaves of layers, l ..., as s r k ...: of each stage its runs of k layers."""
    runs = leaf.reshape(schedule.repeats, schedule.stages, -1, *leaf.shape[1:])
    return jnp.moveaxis(runs, 1, 0)


def _home(schedule, leaf, parts):
    """Rows, b ..., as s g+1 n ...: microbatches where they wait, at the stage that has their rows.

    Those that come out take the place of the group after theirs; the last that enters is no group.
    """
    leaf = leaf.reshape(schedule.stages, parts, schedule.groups, -1, *leaf.shape[1:])
    leaf = jnp.moveaxis(leaf, 2, 1)
    leaf = leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])
    return jnp.concatenate([leaf, jax.lax.stop_gradient(leaf[:, :1])], 1)


def _back(schedule, leaf, parts):
    """The rows again, in their order."""
    leaf = leaf[:, 1:]
    leaf = leaf.reshape(*leaf.shape[:2], parts, -1, *leaf.shape[3:])
    return jnp.moveaxis(leaf, 1, 2).reshape(-1, *leaf.shape[4:])


def _by_layer(schedule, parts, leaf):
    """What all stages gave in all turns, turns s k n ..., as l b ...."""
    stages, repeats = schedule.stages, schedule.repeats
    of = lambda stage, leaf: jax.lax.dynamic_slice_in_dim(leaf, stage, schedule.batches * repeats)
    leaf = jax.vmap(of, (0, 1), spmd_axis_name=STAGE)(jnp.arange(stages), leaf)  # s turns k n ...
    shape = (stages, schedule.groups, repeats, stages, leaf.shape[2], parts, -1, *leaf.shape[4:])
    leaf = jnp.moveaxis(leaf.reshape(shape), (2, 0, 4, 3, 5, 1), range(6))
    return leaf.reshape(repeats * stages * shape[4], -1, *shape[7:])


def _roll(x, by):
    """By one place, to what the compiler writes as one permutation."""
    if by > 0:
        return jnp.concatenate([x[-1:], x[:-1]])
    return jnp.concatenate([x[1:], x[:1]])


@jax.custom_vjp
def _if_real(x, real):
    return x


_if_real.defvjp(
    lambda x, real: (x, real), lambda real, grad: (jnp.where(real, grad, jnp.zeros_like(grad)), None)
)


def _learned_from(run, real):
    """`run`, whose gradient is 0 and not 0 x NaN where what was computed is not real."""
    return jax.tree.map(
        lambda x: _if_real(x, real) if jnp.issubdtype(x.dtype, jnp.inexact) else x, run
    )


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
