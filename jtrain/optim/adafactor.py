"""Adafactor: second moments of matrices from the means of rows and columns."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.types import Leaf
from jtrain.errors import ConfigError
from jtrain.optim.groups import layerwise, stacked_dims
from jtrain.optim.recipe import NO_NAMES, NamedDims, OptimizerConfig


@configclass
class Adafactor(OptimizerConfig):
    """Shazeer & Stern, https://arxiv.org/abs/1804.04235: an optimizer state of rows + columns.

    The decay rate of the second moment at step t (from 0) is 1 - (t + 1)^-memory. Momentum
    and decay are scaled by the learning rate, as everywhere here, which optax's alias does not do.
    """

    kind: Literal["adafactor"] = "adafactor"
    memory: float = Field(default=0.8, gt=0, le=1)
    """Exponent: the second moment decays at the rate 1 - (t + 1)^-memory at step t, from 0."""
    factor_from: int = Field(default=128, ge=2)
    """Size of two dims from which a leaf is factored; other leaves have a full moment."""
    threshold: float = Field(default=1.0, ge=1)
    """Bound of the root mean square of a leaf's direction."""
    relative: bool = True
    """Scale the learning rate by the leaf's root mean square (at least 1e-3)."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Decay rate of the mean direction each step; 0: no momentum and no state for it."""
    eps: float = Field(default=1e-30, gt=0)
    """Number added to the squares of the gradient."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Divide the gradient by its factored root mean square, then add the decay."""
        return self.layered_rule(decay, NO_NAMES)

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """Return the rule with a root mean square for each layer of a stack."""
        stages: list[optax.GradientTransformation] = [
            optax.scale_by_factored_rms(
                decay_rate=self.memory,
                min_dim_size_to_factor=self.factor_from,
                epsilon=self.eps,
            ),
            layerwise(optax.clip_by_block_rms(self.threshold), dims),
        ]
        if self.relative:
            stages.append(layerwise(optax.scale_by_param_block_rms(), dims))
        if self.momentum:
            stages.append(optax.ema(self.momentum, debias=False))
        return optax.chain(*stages, decay)

    def check(self, leaves: Mapping[str, Leaf], dims: NamedDims = NO_NAMES) -> None:
        """Raise if a mean would be taken over the layers of a stack.

        Raises:
            ConfigError: if layers are among the two largest dims of a stack, which are factored.
        """
        super().check(leaves, dims)
        for name, leaf in leaves.items():
            stacked = stacked_dims(name, dims)
            if not stacked or leaf.ndim < 2:
                continue
            factored = np.argsort(leaf.shape)[-2:]  # as optax chooses them
            if min(factored) < stacked and leaf.shape[factored[0]] >= self.factor_from:
                layers = max(leaf.shape[:stacked])
                raise ConfigError(
                    f"optimizer.factor_from={self.factor_from} factors {name} {list(leaf.shape)} "
                    f"over its {layers} layers, which mixes second moments of different layers. "
                    f"Set optimizer.factor_from={layers + 1}, or model.scan=false."
                )
