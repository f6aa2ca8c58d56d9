"""Orthogonalised momentum: the direction of Muon, for stacks of matrices on one or many devices."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonState

from jtrain.core import pytree
from jtrain.core.gradient import MatrixSharding
from jtrain.core.types import Params

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-8  # added to the norm, for a gradient of zeros


def scale_by_orthogonal_momentum(
    *, momentum: float, nesterov: bool, iterations: int
) -> optax.GradientTransformationExtraArgs:
    """Return gradient -> orthogonalised momentum, of each matrix in the last two dims of a leaf.

    The state is that of `optax.contrib.scale_by_muon`. Matrices that are split over devices are
    moved, so that each is whole on one device while it is orthogonalised: the products of the
    iterations communicate nothing, and each device computes its share of the matrices.
    """

    def init(params: Params) -> MuonState:
        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params),
            ns_coeffs=jnp.asarray(COEFFICIENTS),
        )

    def update(
        updates: Params,
        state: Any,  # MuonState
        params: Params | None = None,
        *,
        matrices: MatrixSharding | None = None,
        **known: Any,
    ) -> tuple[Params, MuonState]:
        del params, known
        count = optax.safe_increment(state.count)
        mean = optax.tree.update_moment(updates, state.mu, momentum, 1)
        if nesterov:
            ahead = optax.tree.bias_correction(mean, momentum, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, momentum, count)
            direction = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, now)
        else:
            direction = optax.tree.bias_correction(mean, momentum, count)
        orthogonal = _orthogonalize(direction, state.ns_coeffs, iterations, matrices)
        return orthogonal, MuonState(count=count, mu=mean, ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformationExtraArgs(init, update)


def newton_schulz(
    x: Float[Array, "*n d f"], coefficients: Float[Array, "3"], iterations: int
) -> Float[Array, "*n d f"]:
    """Return matrices whose singular values were pushed towards 1 by a quintic iteration.

    X <- a X + (b A + c A A) X with A = X X^T, from X over its Frobenius norm
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    a, b, c = coefficients.astype(x.dtype)
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + EPS)
    for _ in range(iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if turned else x


def _orthogonalize(
    direction: Params,
    coefficients: Float[Array, "3"],
    iterations: int,
    matrices: MatrixSharding | None,
) -> Params:
    """Orthogonalise the matrices of all leaves: leaves that are sharded alike in one stack."""
    leaves = pytree.named_leaves(direction)
    found: dict[str, Array] = {}
    groups: dict[Any, list[str]] = {}  # leaves whose matrices are moved together
    for name, leaf in leaves.items():
        key = matrices.group(name, leaf) if matrices is not None else None
        if matrices is None or key is None:
            found[name] = newton_schulz(leaf, coefficients, iterations)
        else:
            groups.setdefault(key, []).append(name)
    for key, names in groups.items():
        assert matrices is not None, "no group without it"
        stacks = [leaves[name].reshape(-1, *leaves[name].shape[-2:]) for name in names]
        ends = list(itertools.accumulate(map(len, stacks)))
        fill = -ends[-1] % matrices.shards(key)
        stack = jnp.pad(jnp.concatenate(stacks), ((0, fill), (0, 0), (0, 0)))
        whole = newton_schulz(matrices.gather(stack, key), coefficients, iterations)
        parts = jnp.split(matrices.scatter(whole, key), ends)
        for name, part in zip(names, parts[:-1], strict=True):
            found[name] = part.reshape(leaves[name].shape)
    return jax.tree.unflatten(jax.tree.structure(direction), [found[name] for name in leaves])
