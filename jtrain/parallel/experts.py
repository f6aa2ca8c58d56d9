"""Experts of any number of tokens, on devices that have a part of the experts each.

The devices of the axis `expert` gather their tokens, each computes what its own experts give, and
the sums are scattered back. With n devices on the axis each gets the tokens of n - 1 others and
gives back as much, b t d numbers a device of them, both ways again for the gradient; nothing is
dropped however the tokens are spread, at n times the tokens in memory while a block computes.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jtrain.parallel.rules import activations, axes_of, split_evenly
from jtrain.types import Dims

ROWS, EXPERT, STAGE = ("batch", "time", None), "expert", "stage"


def over_experts(
    mesh: Mesh,
    mix: Callable[..., Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t n"],
    weights: Float[Array, "b t n"],
    kernels: Sequence[Array],
    dims: Sequence[Dims],
) -> Float[Array, "b t d"]:
    """`mix(x, chosen, weights, *kernels)`; see `jtrain.types.Placement`.

    Raises:
        ShardingError: if the experts do not divide into whole ones over their axis.
    """
    sizes, rules = dict(mesh.shape), activations()  # in time over no axis that splits experts
    of = lambda array, named: split_evenly(array.shape, named, rules, sizes).spec
    rows = of(x, ROWS)
    parts = [of(kernel, named) for kernel, named in zip(kernels, dims, strict=True)]
    split = EXPERT in axes_of(parts[0], dims[0].index("experts"))
    apart = split and EXPERT in axes_of(rows, 0)  # else all devices of the axis have all tokens
    summed = axes_of(parts[0], dims[0].index("hidden"))

    def here(x, chosen, weights, *kernels):
        if apart:
            x, chosen, weights = (
                jax.lax.all_gather(part, EXPERT, tiled=True) for part in (x, chosen, weights)
            )
        if split:
            chosen = chosen - jax.lax.axis_index(EXPERT) * len(kernels[0])
        y = mix(x, chosen, weights, *kernels)
        if apart:
            y = jax.lax.psum_scatter(y, EXPERT, tiled=True)
        over = (*summed, EXPERT) if split and not apart else summed
        return jax.lax.psum(y, over) if over else y

    return jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(rows, rows, rows, *parts),
        out_specs=rows,
        axis_names=set(mesh.axis_names) - {STAGE},
    )(x, chosen, weights, *kernels)
