"""Names, sizes, norms and casts of the leaves of a pytree."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.types import Leaf, Tree


def name(path: tuple[Any, ...]) -> str:
    """Return `blocks/0/mlp/kernel` for a key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return each leaf by its name, in the order of the tree."""
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def num_elements(tree: Any) -> int:
    """Return how many numbers the leaves hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def norm(tree: Any) -> Float[Array, ""]:
    """Return the 2-norm over all leaves together, in at least float32."""
    squares = [jnp.sum(_square(at_least_f32(leaf))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def _square(x: Leaf) -> Leaf:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def conjugate(grads: Tree) -> Tree:
    """Return a gradient of `jax.grad` with complex leaves conjugated: the direction of ascent.

    JAX's gradient of a real loss is dL/dx - i dL/dy for z = x + iy, and a step along it climbs in
    y. PyTorch and TensorFlow return dL/dx + i dL/dy. Real leaves are unchanged.
    """
    return jax.tree.map(jnp.conj, grads)


def at_least_f32(tree: Tree) -> Tree:
    """Cast leaves of fewer than 32 bits to float32."""

    def widen(leaf):
        narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widen, tree)


def describe(tree: Any) -> dict[str, str]:
    """Return `float32[16,64]` by leaf name, to compare two trees."""
    return {n: f"{leaf.dtype}{list(leaf.shape)}" for n, leaf in named_leaves(tree).items()}
