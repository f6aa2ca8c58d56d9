"""Muon: momentum with singular values pushed towards 1."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax
from jaxtyping import Array, Float
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core import pytree
from jtrain.core.types import Leaf, Params
from jtrain.errors import ConfigError
from jtrain.optim.adam import Moments
from jtrain.optim.groups import check_pattern, matches
from jtrain.optim.orthogonal_momentum import scale_by_orthogonal_momentum
from jtrain.optim.recipe import NO_NAMES, NamedDims
from jtrain.optim.stacked_layers import layer_ndim

USUAL = ("*embed*", "*/tokens", "*/positions", "*/head", "*/head/*")


@configclass
class Muon(Moments):
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, for a network's matrices.

    Embeddings, heads, and all leaves that are no matrix take AdamW's steps (b1, b2, eps) at the
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
