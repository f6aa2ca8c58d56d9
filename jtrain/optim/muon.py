"""Muon: momentum with singular values pushed towards 1."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonState
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core import pytree
from jtrain.core.gradient import MatrixSharding
from jtrain.core.types import Leaf, Params
from jtrain.errors import ConfigError
from jtrain.optim.adam import Moments
from jtrain.optim.groups import check_pattern, layer_ndim, matches
from jtrain.optim.recipe import NO_NAMES, NamedDims

USUAL = ("*embed*", "*/tokens", "*/positions", "*/head", "*/head/*")


@configclass
class Muon(Moments):
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, for a network's matrices.

    Embeddings, heads, and all leaves that are not a matrix take AdamW's steps (b1, b2, eps) at the
    same learning rate: the step of a matrix has a root mean square of `rms` times the rate, about
    that of AdamW, https://arxiv.org/abs/2502.16982. After 5 iterations singular values above 1 % of
    the Frobenius norm lie in 0.68 .. 1.14; smaller ones are still on their way, none above 1.21
    (measured in tests/optim/test_muon.py).
    """

    kind: Literal["muon"] = "muon"
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the running mean of a matrix's gradients."""
    nesterov: bool = True
    """Use Nesterov's momentum, which looks a step ahead."""
    iterations: int = Field(default=5, ge=1, le=10)
    """Newton-Schulz iterations of three matrix products each."""
    rms: float = Field(default=0.2, gt=0)
    """Root mean square of a full-rank matrix's update at a learning rate of 1."""
    adamw: tuple[str, ...] = USUAL
    """Patterns of matrices that AdamW trains; the default matches the usual names of embeddings
    and heads."""
    stacks: tuple[str, ...] = ()
    """Patterns of leaves that stack matrices in their last two dims, such as the experts of a
    layer, `blocks/*/mixture/*`. Layers under a scan need no pattern; AdamW trains other leaves of
    three dims."""

    def check(self, leaves: Mapping[str, Leaf], dims: NamedDims = NO_NAMES) -> None:
        """Raise unless there is a matrix to train.

        Raises:
            ConfigError: if no leaf is a matrix, or if a pattern matches no leaf.
        """
        super().check(leaves, dims)
        written = () if self.adamw == USUAL else self.adamw
        for key, patterns in (("adamw", written), ("stacks", self.stacks)):
            for i, pattern in enumerate(patterns):
                check_pattern(f"optimizer.{key}[{i}]", pattern, list(leaves))
        for i, pattern in enumerate(self.stacks):
            flat = [n for n, leaf in leaves.items() if matches(n, pattern) and leaf.ndim < 3]
            if flat:
                raise ConfigError(
                    f"optimizer.stacks[{i}] is {pattern!r}, and {flat[0]} has "
                    f"{leaves[flat[0]].ndim} dims, not the three of a stack of matrices: narrow "
                    f"the pattern, or leave it out."
                )
        if not any(self._is_matrix(dims, name, leaf) for name, leaf in leaves.items()):
            shapes = ", ".join(
                f"{name} {list(leaf.shape)}" for name, leaf in list(leaves.items())[:3]
            )
            raise ConfigError(
                f"optimizer.kind=muon trains matrices, and of the {len(leaves)} leaves ({shapes}) "
                f"none is a matrix outside optimizer.adamw: take optimizer.kind=adamw, or "
                f"name leaves of more dims in optimizer.stacks."
            )

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Orthogonalize the momentum of matrices, use Adam for the rest, and add the decay."""
        return self.layered_rule(decay, NO_NAMES)

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """Return the rule with each layer of a stack as a matrix or a vector of its own."""
        matrix = optax.chain(
            scale_by_orthogonal_momentum(
                momentum=self.momentum, nesterov=self.nesterov, iterations=self.iterations
            ),
            optax.stateless(lambda updates, _: jax.tree.map(self._scale_rms, updates)),
        )
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        labels = functools.partial(self._labels, dims)
        return optax.chain(optax.partition({"muon": matrix, "adam": adam}, labels), decay)

    def _scale_rms(self, u: Float[Array, "*n d f"]) -> Float[Array, "*n d f"]:
        """Scale orthogonal matrices, whose root mean square is 1 / sqrt(larger dim), to `rms`."""
        return u * self.rms * max(u.shape[-2:]) ** 0.5

    def _labels(self, dims: NamedDims, params: Params) -> Any:
        matrix = lambda path, leaf: self._is_matrix(dims, pytree.name(path), leaf)
        label = lambda path, leaf: "muon" if matrix(path, leaf) else "adam"
        return jax.tree_util.tree_map_with_path(label, params)

    def _is_matrix(self, dims: NamedDims, name: str, leaf: Leaf) -> bool:
        named = lambda patterns: any(matches(name, pattern) for pattern in patterns)
        matrix = layer_ndim(name, leaf, dims) == 2 or named(self.stacks)
        return matrix and not named(self.adamw)


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
