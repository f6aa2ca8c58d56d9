"""Configs of the feed-forward part of a block; importing them imports no flax."""

import math
from typing import Annotated, ClassVar, Literal, TypeAlias

import jax
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.types import RowsInteract
from jtrain.errors import ConfigError

Activation: TypeAlias = Literal["gelu", "gelu_exact", "swiglu", "geglu"]


@configclass
class NoExperts:
    """One MLP a block, for all tokens."""

    kind: Literal["none"] = "none"
    rows_interact: ClassVar[RowsInteract] = "never"
    bias_update_rate: ClassVar[None] = None


@configclass
class _TopK:
    """Each token goes through the MLPs of the `top_k` experts whose router logits are highest."""

    count: int = Field(default=8, ge=2)
    """Experts a block: MLPs without biases, of the activation and the hidden size of the model."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token goes through."""
    weights: Literal["chosen", "all", "sigmoid"] = "chosen"
    """Weights of the experts' outputs: `chosen` takes the softmax over the logits of the chosen
    experts (Mixtral), `all` over the logits of all experts (Switch), `sigmoid` the sigmoids of the
    chosen logits over their sum (DeepSeek-V3)."""
    bias_update_rate: float | None = Field(default=None, ge=0)
    """Change a step of each expert's bias, up below the mean load and down above. Experts are
    chosen by score + bias, and weighted without it. null: no biases; DeepSeek-V3 has 1e-3."""
    uneven: float = Field(default=1e-2, ge=0)
    """Coefficient of the balance loss, which is 1 where all experts are used equally."""
    group: Literal["row", "batch"] = "row"
    """Tokens of the balance loss: those of each row, exact under any split of the batch, or of the
    whole batch, which is then not cut into microbatches."""
    z: float = Field(default=1e-3, ge=0)
    """Coefficient of the router's z-loss, the square of the log of its softmax's denominator."""

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of rows by the balance loss."""
        return "batch" if self.uneven and self.group == "batch" else "never"

    @model_validator(mode="after")
    def _check_top_k(self) -> "_TopK":
        if self.top_k > self.count:
            raise ConfigError(
                f"top_k={self.top_k} is more than the {self.count} experts of a block. "
                f"Set top_k={min(2, self.count)}, or count={self.top_k}."
            )
        if self.top_k == 1 and self.weights != "all":
            raise ConfigError(
                f"top_k=1 with weights={self.weights}: the weight of a single expert is 1 whatever "
                f"its logit, and the router would get no gradient from its experts' outputs. Set "
                f"weights=all, or top_k=2."
            )
        return self

    def scores(self, logits: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Return the scores that biases are added to: sigmoids, or the softmax over all experts."""
        return jax.nn.sigmoid(logits) if self.weights == "sigmoid" else jax.nn.softmax(logits, -1)


@configclass
class Dropless(_TopK):
    """Experts that take any number of tokens.

    Sources: Jiang et al. 2024 (Mixtral), https://arxiv.org/abs/2401.04088; Gale et al. 2022
    (MegaBlocks), https://arxiv.org/abs/2211.15841.
    """

    kind: Literal["dropless"] = "dropless"


@configclass
class Capacity(_TopK):
    """Experts with a fixed number of places a row, taken by the first tokens that choose them.

    Tokens compete within their row, the earlier before the later; an expert without a place left
    adds nothing to a token. So no row depends on another, and no token on a later one.

    Sources: Lepikhin et al. 2020 (GShard), https://arxiv.org/abs/2006.16668; Fedus et al. 2021
    (Switch), https://arxiv.org/abs/2101.03961.
    """

    kind: Literal["capacity"] = "capacity"
    factor: float = 1.25
    """Places of an expert over its even share of a row's choices; at least 1."""

    @model_validator(mode="after")
    def _check_factor(self) -> "Capacity":
        if self.factor < 1:
            raise ConfigError(
                f"a capacity factor of {self.factor:g} has no place for "
                f"{1 - self.factor:.0%} of the choices even if all experts get the same. Set "
                f"factor=1.25, or kind=dropless, which drops none."
            )
        return self

    def places(self, tokens: int) -> int:
        """Return the places of each expert for a row of `tokens`."""
        return min(tokens, math.ceil(self.factor * self.top_k * tokens / self.count))


Experts: TypeAlias = Annotated[NoExperts | Dropless | Capacity, Field(discriminator="kind")]
