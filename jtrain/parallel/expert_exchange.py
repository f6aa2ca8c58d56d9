"""Experts of any number of tokens, on devices that have a part of the experts each.

The devices of the axis `expert` gather their tokens, each computes what its own experts give, and
the sums are scattered back. With n devices on the axis each gets the tokens of n - 1 others and
gives back as much, b t d numbers a device of them, both ways again for the gradient; nothing is
dropped however the tokens are spread, at n times the tokens in memory while a block computes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jtrain.core.types import Dims
from jtrain.parallel.rules import activations, axes_of, split_evenly

ROWS, EXPERT, STAGE = ("batch", "time", None), "expert", "stage"


class ExpertSplit(NamedTuple):
    """How the devices share what is to be computed."""

    mix: Callable[..., Array]
    experts: bool  # each has a part of the experts
    apart: bool  # and of the tokens
    summed: tuple[str, ...]  # axes over which the outputs are parts of a sum


def exchange_experts(
    mesh: Mesh,
    mix: Callable[..., Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t n"],
    weights: Float[Array, "b t n"],
    kernels: Sequence[Array],
    dims: Sequence[Dims],
    copies: tuple[str, ...] = (),
) -> Float[Array, "b t d"]:
    """`mix(x, chosen, weights, *kernels)`; see `jtrain.core.placement.Placement`.

    Args:
        copies: axes whose devices have each a copy of the layers of a pipeline.

    Raises:
        ShardingError: if the experts do not divide into whole ones over their axis.
    """
    sizes = dict(mesh.shape)
    rules = activations(copies=copies)  # in time over no axis that splits experts
    of = lambda array, named: split_evenly(array.shape, named, rules, sizes).spec
    rows = of(x, ROWS)
    parts = [of(kernel, named) for kernel, named in zip(kernels, dims, strict=True)]
    here = EXPERT in axes_of(parts[0], dims[0].index("experts"))
    apart = here and EXPERT in axes_of(rows, 0)  # else all devices of the axis have all tokens
    summed = axes_of(parts[0], dims[0].index("hidden"))
    split = ExpertSplit(mix, here, apart, (*summed, EXPERT) if here and not apart else summed)
    given, arrays = (rows, rows, rows, *parts), (x, chosen, weights, *kernels)
    if STAGE not in mesh.axis_names:
        of_device = functools.partial(_mixed, split)
        return jax.shard_map(of_device, mesh=mesh, in_specs=given, out_specs=rows)(*arrays)
    tokens = (*axes_of(rows, 0), *axes_of(rows, 1))
    tokens = tuple(axis for axis in tokens if not (apart and axis == EXPERT))
    return _in_stages(mesh, split, tokens, given, *arrays)


def _mixed(split, x, chosen, weights, *kernels):
    """What a device gives its own tokens, of all devices' experts."""
    y = split.mix(*_met(split, x, chosen, weights, kernels), *kernels)
    return _home(split, y)


def _met(split, x, chosen, weights, kernels):
    """The tokens of all devices of the axis, and which of the experts here they chose."""
    if split.apart:
        gather = lambda part: jax.lax.all_gather(part, EXPERT, tiled=True)
        x, chosen, weights = gather(x), gather(chosen), gather(weights)
    if split.experts:
        chosen = chosen - jax.lax.axis_index(EXPERT) * len(kernels[0])
    return x, chosen, weights


def _home(split, y):
    """The sum of what all devices give, each with its own tokens."""
    if split.apart:
        y = jax.lax.psum_scatter(y, EXPERT, tiled=True)
    return jax.lax.psum(y, split.summed) if split.summed else y


# A pipeline computes under `jax.vmap`, which cannot batch a `shard_map` that autodiff went through:
# what that keeps is split over all axes, that of the stages among them. So both ways are written
# out, the way back computing forward again; and on a device, where each stage and copy is alone,
# they are not batched, as a product of ragged groups would be a dense one.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _in_stages(mesh, split, tokens, given, *arrays):
    """`_mixed` under the `jax.vmap` of a pipeline; `tokens`: axes whose tokens differ."""
    del tokens
    of_device = sequential_vmap(functools.partial(_mixed, split))
    shards = jax.shard_map(
        of_device, mesh=mesh, in_specs=given, out_specs=given[0], check_vma=False
    )
    return shards(*arrays)


def _stages_back(mesh, split, tokens, given, arrays, grad):
    def back(grad, x, chosen, weights, *kernels):
        x, chosen, weights = _met(split, x, chosen, weights, kernels)
        if split.apart:
            grad = jax.lax.all_gather(grad, EXPERT, tiled=True)
        mixed = lambda x, weights, *kernels: split.mix(x, chosen, weights, *kernels)
        of_x, of_weights, *of_kernels = jax.vjp(mixed, x, weights, *kernels)[1](grad)
        whole = [jax.lax.psum(part, tokens) if tokens else part for part in of_kernels]
        return _home(split, of_x), _home(split, of_weights), *whole

    gives = (given[0], *given[2:])
    shards = jax.shard_map(
        sequential_vmap(back),
        mesh=mesh,
        in_specs=(given[0], *given),
        out_specs=gives,
        check_vma=False,
    )
    of_x, *rest = shards(grad, *arrays)
    return of_x, None, *rest


_in_stages.defvjp(lambda *given: (_in_stages(*given), given[4:]), _stages_back)
