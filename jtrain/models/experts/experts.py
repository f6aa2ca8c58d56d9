"""The values of a mixture of experts; importing them imports no flax."""

import math
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.types import Couples
from jtrain.errors import ConfigError


@configclass
class NoExperts:
    """One MLP a block, for all tokens."""

    kind: Literal["none"] = "none"
    couples: ClassVar[Couples] = "nothing"


@configclass
class _Chosen:
    """Each token goes through the MLPs of the `top_k` experts whose router logits are highest."""

    count: int = Field(default=8, ge=2)
    """Experts a block: MLPs without biases, of the activation and the hidden size of the model."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token goes through."""
    weights: Literal["chosen", "all"] = "chosen"
    """What the experts' outputs are weighed by: the softmax over the logits of those chosen
    (Mixtral), or over all logits, of which those chosen are a part (Switch)."""
    uneven: float = Field(default=1e-2, ge=0)
    """Times how unevenly experts are used, 1 at best: added to the loss."""
    group: Literal["row", "batch"] = "row"
    """The tokens over which that is taken: those of each row, exact under any split of the batch,
    or all of the batch, which then is not cut into microbatches."""
    z: float = Field(default=1e-3, ge=0)
    """Times the square of the log of the denominator of the router's softmax: added, too."""

    @property
    def couples(self) -> Couples:
        """Whether the loss makes rows meet."""
        return "batch" if self.uneven and self.group == "batch" else "nothing"

    @model_validator(mode="after")
    def _fits_together(self) -> "_Chosen":
        if self.top_k > self.count:
            raise ConfigError(
                f"top_k={self.top_k} asks for more experts a token than the {self.count} there "
                f"are. Set top_k={min(2, self.count)}, or count={self.top_k}."
            )
        if self.top_k == 1 and self.weights == "chosen":
            raise ConfigError(
                "top_k=1 with weights=chosen: the softmax over one logit is 1 whatever it is, and "
                "the router would learn nothing from what its experts give. Set weights=all, or "
                "top_k=2."
            )
        return self


@configclass
class Dropless(_Chosen):
    """Experts that take every token that is sent to them, however many.

    Sources: Jiang et al. 2024 (Mixtral), https://arxiv.org/abs/2401.04088; Gale et al. 2022
    (MegaBlocks), https://arxiv.org/abs/2211.15841.
    """

    kind: Literal["dropless"] = "dropless"


@configclass
class Capacity(_Chosen):
    """Experts with as many places a row, for its first tokens that choose them.

    Tokens compete within their row, the earlier before the later; what finds no place adds nothing
    there. So no row depends on another, and no token on a later one.

    Sources: Lepikhin et al. 2020 (GShard), https://arxiv.org/abs/2006.16668; Fedus et al. 2021
    (Switch), https://arxiv.org/abs/2101.03961.
    """

    kind: Literal["capacity"] = "capacity"
    factor: float = 1.25
    """Places over what an expert would get of a row if all got the same: at least 1."""

    @model_validator(mode="after")
    def _room_for_all(self) -> "Capacity":
        if self.factor < 1:
            raise ConfigError(
                f"a capacity factor of {self.factor:g} has no place for "
                f"{1 - self.factor:.0%} of the choices even where all experts get the same. Set "
                f"factor=1.25, or kind=dropless, which drops none."
            )
        return self

    def places(self, tokens: int) -> int:
        """Places that each expert has for a row of so many tokens."""
        return min(tokens, math.ceil(self.factor * self.top_k * tokens / self.count))


Experts: TypeAlias = Annotated[NoExperts | Dropless | Capacity, Field(discriminator="kind")]
