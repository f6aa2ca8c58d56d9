"""The values of a decoder-only transformer; importing them imports no flax."""

from typing import Literal

from pydantic import Field, model_validator

from jtrain.errors import ConfigError
from jtrain.types import Anywhere, Model, Placement
from jtrain.values import values


@values
class Transformer:
    """A GPT-2-like language model: learned positions, LayerNorm before each part, tanh GELU.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    kind: Literal["transformer"] = "transformer"
    vocab: int = Field(default=0, ge=0)
    """Number of different tokens; 0 takes what the data has."""
    context: int = Field(default=64, gt=0)
    """Tokens that the model sees at once, at most."""
    layers: int = Field(default=4, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=4, gt=0)
    """Attention heads a block; must divide `width`."""
    width: int = Field(default=128, gt=0)
    """Numbers a position between blocks; the MLPs are 4 times as wide."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Chance that a number is dropped after the embedding, each attention and each MLP."""
    bias: bool = True
    """Whether linear maps and norms add a bias."""
    tied: bool = True
    """Whether the head that gives the logits is the token embedding."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "Transformer":
        if self.width % self.heads:
            fits = [n for n in range(1, self.width + 1) if self.width % n == 0]
            nearest = min(fits, key=lambda n: abs(n - self.heads))
            raise ConfigError(
                f"{self.heads} heads do not divide width {self.width}. Nearest: heads={nearest}."
            )
        return self

    def build(self, place: Placement = Anywhere()) -> Model:
        """`apply(params, {}, rng, train, tokens, keys)` gives logits b t v.

        `keys` are the rows' (`jtrain.row_keys`), or None where nothing is dropped; `rng` is not
        used.

        Raises:
            ConfigError: if `vocab` is still 0.
        """
        if not self.vocab:
            raise ConfigError(
                "a transformer of vocab=0 has no tokens: the experiment did not say how many its "
                "data has. Set model.vocab."
            )
        from jtrain.models.decoder import Decoder  # flax: 0.6 s, only where a model is built
        from jtrain.models.nnx import from_nnx

        return from_nnx(lambda rngs: Decoder(self, place, rngs))
