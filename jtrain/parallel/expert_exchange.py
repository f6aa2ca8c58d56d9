"""Expert parallelism: dropless experts sharded over devices, with an exchange of tokens.

The devices of the axis `expert` gather their tokens, each applies its own experts, and the sums are
scattered back. With n devices on the axis each receives the tokens of n - 1 others and sends as
many outputs, b t d numbers a device, and twice that again for the gradient. No token is dropped
however the tokens are distributed, at n times the tokens in memory while a block computes.
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
    """Split of the computation over devices."""

    mix: Callable[..., Array]
    experts: bool  # experts are sharded over `expert`
    tokens: bool  # and tokens too
    summed: tuple[str, ...]  # axes over which outputs are summed


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
    """Return `mix(x, chosen, weights, *kernels)`; see `jtrain.core.placement.Placement`.

    Args:
        copies: axes whose devices have a replica of a pipeline's layers each.

    Raises:
        ShardingError: if the axis does not divide the number of experts.
    """
    sizes = dict(mesh.shape)
    rules = activations(copies=copies)  # time is not split over an axis of experts
    spec = lambda array, named: split_evenly(array.shape, named, rules, sizes).spec
    rows = spec(x, ROWS)
    kernel_specs = [spec(kernel, named) for kernel, named in zip(kernels, dims, strict=True)]
    experts = EXPERT in axes_of(kernel_specs[0], dims[0].index("experts"))
    sharded = experts and EXPERT in axes_of(rows, 0)  # else the axis replicates all tokens
    summed = axes_of(kernel_specs[0], dims[0].index("hidden"))
    summed = (*summed, EXPERT) if experts and not sharded else summed
    split = ExpertSplit(mix, experts, sharded, summed)
    specs, arrays = (rows, rows, rows, *kernel_specs), (x, chosen, weights, *kernels)
    if STAGE not in mesh.axis_names:
        on_device = functools.partial(_mix, split)
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=rows)(*arrays)
    tokens = (*axes_of(rows, 0), *axes_of(rows, 1))
    tokens = tuple(axis for axis in tokens if not (sharded and axis == EXPERT))
    return _in_stages(mesh, split, tokens, specs, *arrays)


def _mix(split, x, chosen, weights, *kernels):
    y = split.mix(*_gather(split, x, chosen, weights, kernels), *kernels)
    return _scatter(split, y)


def _gather(split, x, chosen, weights, kernels):
    """Gather the tokens of the axis, with choices as indices into the local experts."""
    if split.tokens:
        gather = lambda part: jax.lax.all_gather(part, EXPERT, tiled=True)
        x, chosen, weights = gather(x), gather(chosen), gather(weights)
    if split.experts:
        chosen = chosen - jax.lax.axis_index(EXPERT) * len(kernels[0])
    return x, chosen, weights


def _scatter(split, y):
    if split.tokens:
        y = jax.lax.psum_scatter(y, EXPERT, tiled=True)
    return jax.lax.psum(y, split.summed) if split.summed else y


# A pipeline computes under `jax.vmap`, which cannot batch a differentiated `shard_map`: its
# residuals are split over all axes, including that of the stages. So forward and backward pass are
# written out, the backward pass recomputes the forward, and on a device, which has one stage and
# replica, they are not batched: a batched ragged product would become a dense one.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _in_stages(mesh, split, tokens, specs, *arrays):
    """Apply `_mix` under the `jax.vmap` of a pipeline; `tokens`: axes whose tokens differ."""
    del tokens
    on_device = sequential_vmap(functools.partial(_mix, split))
    shards = jax.shard_map(
        on_device, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )
    return shards(*arrays)


def _stages_back(mesh, split, tokens, specs, arrays, grad):
    def backward(grad, x, chosen, weights, *kernels):
        x, chosen, weights = _gather(split, x, chosen, weights, kernels)
        if split.tokens:
            grad = jax.lax.all_gather(grad, EXPERT, tiled=True)
        forward = lambda x, weights, *kernels: split.mix(x, chosen, weights, *kernels)
        grad_x, grad_weights, *grads = jax.vjp(forward, x, weights, *kernels)[1](grad)
        grads = [jax.lax.psum(part, tokens) if tokens else part for part in grads]
        return _scatter(split, grad_x), _scatter(split, grad_weights), *grads

    out_specs = (specs[0], *specs[2:])
    shards = jax.shard_map(
        sequential_vmap(backward),
        mesh=mesh,
        in_specs=(specs[0], *specs),
        out_specs=out_specs,
        check_vma=False,
    )
    grad_x, *grads = shards(grad, *arrays)
    return grad_x, None, *grads


_in_stages.defvjp(lambda *args: (_in_stages(*args), args[4:]), _stages_back)
