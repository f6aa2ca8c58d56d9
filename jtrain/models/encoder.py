"""The config of a text encoder, and what its blocks share with those of a ViT; no flax."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.models.presets import check_heads
from jtrain.models.published import Published, build_network


class EncoderBlocks:
    """Values of the blocks of an encoder, where a `Transformer` has fields."""

    heads: int
    width: int
    hidden: int
    epsilon: float

    norm: ClassVar[Literal["layer", "rms"]] = "layer"
    bias = qkv_bias = True
    zero_centered = qk_norm = post_norm = False

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads

    @property
    def size_of_head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def size_of_hidden(self) -> int:
        """Hidden width of the MLPs."""
        return self.hidden or 4 * self.width


@configclass
class Encoder(EncoderBlocks, Published):
    """A text encoder as BERT: learned positions, token types, a norm after each residual.

    Source: Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
    """

    kind: Literal["encoder"] = "encoder"
    network = "encoder:TextEncoder"
    vocab: int = Field(default=30522, gt=0)
    """Number of different tokens."""
    context: int = Field(default=512, gt=0)
    """Most tokens that the model reads at once."""
    token_types: int = Field(default=2, gt=0)
    """Parts of a text that tokens are marked to belong to."""
    layers: int = Field(default=12, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=12, gt=0)
    """Attention heads a block; must divide `width`."""
    width: int = Field(default=768, gt=0)
    """Width of a position between blocks."""
    hidden: int = Field(default=0, ge=0)
    """Hidden width of the MLPs; 0: 4 x width."""
    epsilon: float = Field(default=1e-12, gt=0)
    """Number added to the variance in a norm."""
    activation: Literal["gelu", "gelu_exact"] = "gelu_exact"
    """Activation of the MLPs: GELU by tanh, or GELU."""
    pooler: bool = False
    """Have the linear map of the first position's vector, for `method="pooled"`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embedding, each attention and each MLP."""

    @model_validator(mode="after")
    def _check_heads(self) -> "Encoder":
        check_heads(self.width, self.heads)
        return self

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, {}, tokens, visible, types, rng=keys)` returns b t d.

        `visible` (b t) is false for padding and `types` (b t) the part of the text; both may be
        left out. `method="pooled"` returns b d. `jtrain.models.embeddings` pools and compares.
        """
        return build_network(self, placement)
