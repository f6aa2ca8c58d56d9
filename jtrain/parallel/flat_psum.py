"""Sums over devices of all leaves of a tree in one message."""

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp


def flat_psum(tree: Any, axis: str) -> Any:
    """Sum each leaf over `axis`, by one message for each dtype, with the bits of `jax.lax.psum`.

    Between processes of CPUs each message costs about as much as a megabyte does, and a tree of
    gradients has hundreds of leaves (benchmarks/flat_psum.py). Where the interconnect is not a
    socket the compiler joins messages itself, and the copy made here gains nothing.
    """
    leaves, structure = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        indices = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        sizes = [leaves[i].size for i in indices]
        total = jax.lax.psum(jnp.concatenate([leaves[i].ravel() for i in indices]), axis)
        parts = jnp.split(total, list(accumulate(sizes))[:-1])
        for i, part in zip(indices, parts, strict=True):
            summed[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, summed)
