"""The config of a decoder-only transformer; importing it imports no flax."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError
from jtrain.models.attention.positions import LearnedPositions, Positions
from jtrain.models.experts.experts import Experts, NoExperts
from jtrain.models.language_model import LanguageModel, build_language_model
from jtrain.models.layers.feed_forward import Activation
from jtrain.models.presets.language import LANGUAGE_PRESETS, LanguagePreset
from jtrain.models.presets.vision import with_preset
from jtrain.models.pretrained.config_values import Published, with_pretrained

_log = logging.getLogger(__name__)


@configclass
class Transformer(Published):
    """A causal language model; the defaults are a small GPT-2.

    A norm before attention and before the MLP, and a residual connection around each. The source
    of every option is named where the option is implemented.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = LANGUAGE_PRESETS

    kind: Literal["transformer"] = "transformer"
    preset: LanguagePreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder as Hugging Face lays it out, or a GGUF file: a new run takes its weights, and its
    values where none are given beside it. In Python: pretrained=PATH. Empty: none."""
    vocab: int = Field(default=0, ge=0)
    """Number of different tokens; 0: those of the data."""
    context: int = Field(default=64, gt=0)
    """Most tokens that the model reads at once."""
    layers: int = Field(default=4, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=4, gt=0)
    """Attention heads a block; must divide `width` unless `head_size` is given."""
    width: int = Field(default=128, gt=0)
    """Width of a position between blocks."""
    kv_heads: int = Field(default=0, ge=0)
    """Heads of keys and values, shared evenly by the query heads; 0: as many as `heads`."""
    head_size: int = Field(default=0, ge=0)
    """Width of a head; 0: width / heads."""
    hidden: int = Field(default=0, ge=0)
    """Hidden width of the MLPs; 0: 4 x width."""
    positions: Positions = LearnedPositions()
    """Encoding of positions: learned, rotary or none."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm, which subtracts no mean and has no bias."""
    epsilon: float = Field(default=1e-5, gt=0)
    """Number added to the variance or the mean square in a norm."""
    activation: Activation = "gelu"
    """Activation of the MLPs: GELU by tanh as in GPT-2, GELU, or with a third kernel SwiGLU, or
    GeGLU by tanh as in Gemma."""
    experts: Experts = NoExperts()
    """Mixture of experts instead of each MLP: dropless, with a capacity, or none."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embedding, each attention and each MLP."""
    bias: bool = True
    """Biases in linear maps and norms."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, also where `bias` is false (Qwen2)."""
    tied: bool = True
    """Use the token embedding as the head that gives the logits."""
    post_norm: bool = False
    """Normalise also the outputs of attention and MLP, before they are added (Gemma 2)."""
    zero_centered: bool = False
    """Norms multiply by 1 + scale, and scales begin at 0 (Gemma)."""
    embedding_scale: float = Field(default=1.0, gt=0)
    """Factor of the token embeddings; Gemma's is the square root of `width`."""
    qk_norm: bool = False
    """Normalise queries and keys head by head, before rotary positions."""
    window: int | None = Field(default=None, gt=0)
    """Positions that attention sees, its own included; null: all before it."""
    global_every: int = Field(default=0, ge=0)
    """With a window, every so many layers one layer sees all before it; 0: none does."""
    attention_cap: float | None = Field(default=None, gt=0)
    """Soft cap of attention scores, cap x tanh(score / cap); null: no cap."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor of attention scores; null: 1 / square root of the size of a head."""
    logit_cap: float | None = Field(default=None, gt=0)
    """Soft cap of the logits; null: no cap."""
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    """Implementation of attention: xla anywhere, cudnn on an NVIDIA GPU, splash on a TPU."""
    scan: bool = False
    """Run the blocks as one loop over stacked parameters: a program as small as one block."""
    remat: Literal["none", "full", "dots", "dots_with_no_batch_dims", "names"] = "none"
    """Recomputed in the backward pass: nothing, all of a block, all but its matrix products (or
    but those without a batch dim: all but the attention's), or all but what `saved` names."""
    saved: tuple[Literal["qkv", "attention", "hidden"], ...] = ()
    """With remat `names`: queries, keys and values; attention outputs; MLPs before activation."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        return with_preset(with_pretrained(given, cls), cls.presets)

    @model_validator(mode="after")
    def _check_fields(self) -> "Transformer":
        for message in self._errors():
            raise ConfigError(message)
        return self

    def _errors(self) -> Iterator[str]:
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
                f"rotary positions rotate pairs of numbers, and a head has {self.size_of_head}: an "
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
                f"remat={self.remat} with saved=[{', '.join(self.saved)}]: remat=names needs names "
                f"to save, and no other remat takes any. Set remat=names and "
                f"saved=[qkv, attention], or remat=none and saved=[]."
            )

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Width of a head."""
        return self.head_size or self.width // self.heads

    @property
    def size_of_hidden(self) -> int:
        """Hidden width of the MLPs."""
        return self.hidden or 4 * self.width

    def window_of(self, layer: int) -> int | None:
        """Return the positions that layer number `layer`, from 0, sees; None: all before it."""
        return None if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    def context_misfits(self, tokens: int) -> Iterator[tuple[str, str]]:
        """Yield the conflict with rows of `tokens` tokens, `data.context`, if there is one."""
        if tokens > self.context:
            yield (
                "data.context",
                f"{tokens} tokens are more than the model's context of {self.context}; set "
                f"model.context={tokens} or data.context={self.context}",
            )

    def for_tokens(self, count: int) -> "Transformer":
        """Return the config for data with `count` different tokens; a larger `vocab` stays.

        Raises:
            ConfigError: if `vocab` was given and is smaller.
        """
        if self.vocab and self.vocab < count:
            raise ConfigError(
                f"model.vocab={self.vocab} is smaller than the {count} different tokens of the "
                f"data. Set model.vocab={count}, or model.vocab=0 to take what the data has."
            )
        if self.vocab >= 2 * count and not self.pretrained:
            _warn_unused_tokens(self.vocab, count)
        return self if self.vocab else dataclasses.replace(self, vocab=count)

    def build(self, placement: Placement = Unplaced()) -> LanguageModel:
        """Build the model: `apply(params, {}, tokens, rng=keys)` returns logits b t v.

        `keys` are those of the rows (`jtrain.row_keys`), for dropout; `segments=` are those of
        packed rows. `jtrain.models.language_model` has the model's other functions.

        Raises:
            ConfigError: if `vocab` is still 0.
        """
        if not self.vocab:
            raise ConfigError(
                "a transformer of vocab=0 has no tokens: the experiment did not say how many its "
                "data has. Set model.vocab."
            )
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where built
        from jtrain.models.networks.decoder import Decoder

        def make(rngs: Any) -> Decoder:
            return Decoder(
                vocab=self.vocab,
                context=self.context,
                layers=self.layers,
                heads=self.heads,
                width=self.width,
                kv_heads=self.groups,
                head_size=self.size_of_head,
                hidden=self.size_of_hidden,
                positions=self.positions,
                norm=self.norm,
                epsilon=self.epsilon,
                activation=self.activation,
                experts=self.experts,
                dropout=self.dropout,
                bias=self.bias,
                qkv_bias=self.qkv_bias,
                tied=self.tied,
                qk_norm=self.qk_norm,
                post_norm=self.post_norm,
                zero_centered=self.zero_centered,
                embedding_scale=self.embedding_scale,
                windows=tuple(self.window_of(layer) for layer in range(self.layers)),
                attention_cap=self.attention_cap,
                attention_scale=self.attention_scale,
                logit_cap=self.logit_cap,
                attention=self.attention,
                scan=self.scan,
                remat=self.remat,
                saved=self.saved,
                placement=placement,
                rngs=rngs,
            )

        return build_language_model(
            from_nnx(make),
            context=self.context,
            layers=self.layers,
            kv_heads=self.groups,
            head_size=self.size_of_head,
            tied=self.tied,
            scan=self.scan,
            logit_cap=self.logit_cap,
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))


@functools.cache  # a run builds its model several times
def _warn_unused_tokens(vocab: int, count: int) -> None:
    _log.warning(
        f"model.vocab={vocab}, and the data has {count} different tokens: the others are never "
        f"trained. model.vocab=0 takes those of the data."
    )
