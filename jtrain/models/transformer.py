"""The values of a decoder-only transformer; importing them imports no flax."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError
from jtrain.models.attention.positions import LearnedPositions, Positions
from jtrain.models.experts.experts import Experts, NoExperts
from jtrain.models.presets.choose import with_preset
from jtrain.models.presets.language import LANGUAGE_PRESETS, LanguagePreset

if TYPE_CHECKING:
    from jtrain.models.language_model import LanguageModel


@configclass
class Transformer:
    """A language model that reads from left to right; as it stands, GPT-2 made small.

    Norm before each part, both parts added to what came in. Every value has its source where it is
    implemented.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = LANGUAGE_PRESETS

    kind: Literal["transformer"] = "transformer"
    preset: LanguagePreset = "none"
    """A published model whose values these are where they are not given beside it."""
    vocab: int = Field(default=0, ge=0)
    """Number of different tokens; 0 takes what the data has."""
    context: int = Field(default=64, gt=0)
    """Tokens that the model sees at once, at most."""
    layers: int = Field(default=4, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=4, gt=0)
    """Attention heads a block; must divide `width` unless `head_size` is given."""
    width: int = Field(default=128, gt=0)
    """Numbers a position between blocks."""
    kv_heads: int = Field(default=0, ge=0)
    """Heads of keys and values, each shared by as many query heads; 0: as many as `heads`."""
    head_size: int = Field(default=0, ge=0)
    """Numbers in a head; 0: width / heads."""
    hidden: int = Field(default=0, ge=0)
    """Numbers a position inside of the MLPs; 0: 4 x width."""
    positions: Positions = LearnedPositions()
    """How it knows where a token stands: learned, rotary or none."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm, which takes out no mean and has no bias."""
    epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance or the mean square in a norm."""
    activation: Literal["gelu", "gelu_exact", "swiglu"] = "gelu"
    """The bend of the MLPs: GELU by tanh as in GPT-2, GELU, or SwiGLU, which has a third kernel."""
    experts: Experts = NoExperts()
    """A mixture of experts in the place of each MLP: dropless, with a capacity, or none."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Chance that a number is dropped after the embedding, each attention and each MLP."""
    bias: bool = True
    """Whether linear maps and norms add a bias."""
    tied: bool = True
    """Whether the head that gives the logits is the token embedding."""
    qk_norm: bool = False
    """Whether queries and keys are normalised head by head, before they are turned."""
    window: int | None = Field(default=None, gt=0)
    """Positions that attention sees, its own included; null: all that came before."""
    global_every: int = Field(default=0, ge=0)
    """With a window, every so many layers one sees all that came before; 0: none does."""
    attention_cap: float | None = Field(default=None, gt=0)
    """Attention scores become cap x tanh(score / cap); null: they stay."""
    logit_cap: float | None = Field(default=None, gt=0)
    """The logits likewise."""
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    """Who computes attention: xla anywhere, cudnn on an NVIDIA GPU, splash on a TPU."""
    scan: bool = False
    """Whether the blocks are one loop over stacked parameters: a program as small as one block."""
    remat: Literal["none", "full", "dots", "dots_with_no_batch_dims", "names"] = "none"
    """What the backward pass computes once more: nothing, all of a block, all but its matrix
    products (those without a batch dim: all but the attention's), or all but what `saved` names."""
    saved: tuple[Literal["qkv", "attention", "hidden"], ...] = ()
    """With remat `names`: queries, keys and values; what attention gives; MLPs before the bend."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, given: Any) -> Any:
        return with_preset(given, cls.presets)

    @model_validator(mode="after")
    def _fits_together(self) -> "Transformer":
        for words in self._misfits():
            raise ConfigError(words)
        return self

    def _misfits(self) -> Iterator[str]:
        if not self.head_size and self.width % self.heads:
            near = _nearest_divisor(self.width, self.heads)
            yield f"{self.heads} heads do not divide width {self.width}. Nearest: heads={near}."
        if self.heads % self.groups:
            near = _nearest_divisor(self.heads, self.groups)
            yield (
                f"{self.groups} kv_heads do not divide {self.heads} heads. "
                f"Nearest: kv_heads={near}."
            )
        if self.positions.kind == "rotary" and self.size_of_head % 2:
            yield (
                f"rotary positions turn pairs of numbers, and a head has {self.size_of_head}: an "
                f"odd number. Set head_size={self.size_of_head + 1}, or another width or heads."
            )
        if self.global_every and self.window is None:
            yield (
                f"global_every={self.global_every} lifts a window, and there is none. "
                f"Set window=1024 say, or global_every=0."
            )
        if self.global_every and self.scan:
            yield (
                "scan=true runs layers that are all alike, and with "
                f"global_every={self.global_every} some have a window. Set scan=false or "
                "global_every=0."
            )
        if (self.remat == "names") != bool(self.saved):
            yield (
                f"remat={self.remat} with saved=[{', '.join(self.saved)}]: names are saved where "
                f"remat=names, and only there. Set remat=names and saved=[qkv, attention], or "
                f"remat=none and saved=[]."
            )

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Numbers in a head."""
        return self.head_size or self.width // self.heads

    @property
    def size_of_hidden(self) -> int:
        """Numbers a position inside of the MLPs."""
        return self.hidden or 4 * self.width

    def window_of(self, layer: int) -> int | None:
        """Positions that a layer sees, counted from 0; None: all that came before."""
        return None if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    def for_tokens(self, count: int) -> "Transformer":
        """The same for data with `count` different tokens; a vocabulary that is larger stays.

        Raises:
            ConfigError: if `vocab` was given and is smaller.
        """
        if self.vocab and self.vocab < count:
            raise ConfigError(
                f"model.vocab={self.vocab} is smaller than the {count} different tokens of the "
                f"data. Set model.vocab={count}, or model.vocab=0 to take what the data has."
            )
        return self if self.vocab else dataclasses.replace(self, vocab=count)

    def build(self, place: Placement = Unplaced()) -> "LanguageModel":
        """`apply(params, {}, rng, train, tokens, keys)` gives logits b t v.

        `keys` are the rows' (`jtrain.row_keys`), or None where nothing is dropped; `rng` is not
        used. What else it gives: `jtrain.models.language_model`.

        Raises:
            ConfigError: if `vocab` is still 0.
        """
        if not self.vocab:
            raise ConfigError(
                "a transformer of vocab=0 has no tokens: the experiment did not say how many its "
                "data has. Set model.vocab."
            )
        from jtrain.models.language_model import language_model  # flax: 0.6 s, only where built

        return language_model(self, place)


def _nearest_divisor(whole: int, wanted: int) -> int:
    fits = [n for n in range(1, whole + 1) if whole % n == 0]
    return min(fits, key=lambda n: abs(n - wanted))
