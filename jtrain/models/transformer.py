"""The config of a decoder-only transformer, and the language model that it builds; no flax."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Extra, Keys, Params
from jtrain.errors import ConfigError
from jtrain.losses.balance import bias_update, expert_choices
from jtrain.models.attention.blockwise import KVCache
from jtrain.models.attention.rotary import LearnedPositions, Positions
from jtrain.models.experts import Activation, Experts, NoExperts
from jtrain.models.presets import (
    LANGUAGE_PRESETS,
    LanguagePreset,
    check_heads,
    nearest_divisor,
)
from jtrain.models.published import Published, build_network

_log = logging.getLogger(__name__)
BIAS = "expert_bias"  # in `extra`, l e


@configclass
class Transformer(Published):
    """A causal language model; the defaults are a small GPT-2.

    A norm before attention and before the MLP, and a residual connection around each. The source
    of every option is named where the option is implemented.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = LANGUAGE_PRESETS
    dials: ClassVar[tuple[str, ...]] = ("depth", "aspect")

    kind: Literal["transformer"] = "transformer"
    network = "decoder:Decoder"
    preset: LanguagePreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    vocab: int = Field(default=0, ge=0)
    """Number of different tokens; 0: those of the data."""
    context: int = Field(default=64, gt=0)
    """Most tokens that the model reads at once."""
    depth: int = Field(default=0, ge=0, le=1000, strict=True)
    """One dial: layers and heads; width is `aspect` times as much. In configs of the experiments
    language and shakespeare also steps, batch and the rates of adamw and muon. 0: off."""
    aspect: int = Field(default=64, gt=0, strict=True)
    """Width over depth: 64 is GPT-2's (depth 12), 128 Llama 2 7B's (depth 32)."""
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
    multi_token_depth: int = Field(default=0, ge=0)
    """Tokens after the next one that training predicts too, each by a block of its own; DeepSeek-V3
    has 1. Sampling does not use them."""
    multi_token_weight: float = Field(default=0.3, ge=0)
    """Coefficient of the mean of their losses."""
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
    attention: Literal["xla", "cudnn", "splash", "tokamax"] = "xla"
    """Implementation of attention: xla anywhere, cudnn on an NVIDIA GPU, splash on a TPU, tokamax
    where its package is installed."""
    scan: bool = False
    """Run the blocks as one loop over stacked parameters: a program as small as one block."""
    remat: Literal["none", "full", "dots", "dots_with_no_batch_dims", "names"] = "none"
    """Recomputed in the backward pass: nothing, all of a block, all but its matrix products (or
    but those without a batch dim: all but the attention's), or all but what `saved` names."""
    saved: tuple[Literal["qkv", "attention", "hidden"], ...] = ()
    """With remat `names`: queries, keys and values; attention outputs; MLPs before activation."""

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the shape that the depth and the aspect among the values imply."""
        depth, aspect = values.get("depth", 0), values.get("aspect", 64)
        if type(depth) is not int or type(aspect) is not int or min(depth, aspect) < 1:
            return {}  # the check of the fields says why
        usual = {"kv_heads": 0, "head_size": 0, "hidden": 0}
        return {"layers": depth, "heads": depth, "width": depth * aspect, **usual}

    @model_validator(mode="after")
    def _check_fields(self) -> "Transformer":
        if self.depth and self.pretrained:
            raise ConfigError(
                f"depth={self.depth} sets a shape, and from={self.pretrained} has its own: leave "
                f"one of them out."
            )
        if self.aspect != 64 and not self.depth:
            raise ConfigError(
                f"aspect={self.aspect} is of depth, which is 0: set depth={self.layers}, or "
                f"width={self.aspect * self.layers} in its place."
            )
        if not self.head_size:
            check_heads(self.width, self.heads)
        if self.heads % self.groups:
            near = nearest_divisor(self.heads, self.groups)
            raise ConfigError(
                f"{self.groups} kv_heads do not divide {self.heads} heads. "
                f"Nearest: kv_heads={near}."
            )
        if self.positions.kind == "rotary" and self.size_of_head % 2:
            raise ConfigError(
                f"rotary positions rotate pairs of numbers, and a head has {self.size_of_head}: an "
                f"odd number. Set head_size={self.size_of_head + 1}, or another width or heads."
            )
        if self.global_every and self.window is None:
            raise ConfigError(
                f"global_every={self.global_every} lifts a window, and there is none. "
                f"Set window=1024 say, or global_every=0."
            )
        if self.global_every and self.scan:
            raise ConfigError(
                "scan=true runs layers that are all alike, and with "
                f"global_every={self.global_every} some have a window. Set scan=false or "
                "global_every=0."
            )
        if (self.remat == "names") != bool(self.saved):
            raise ConfigError(
                f"remat={self.remat} with saved=[{', '.join(self.saved)}]: remat=names needs names "
                f"to save, and no other remat takes any. Set remat=names and "
                f"saved=[qkv, attention], or remat=none and saved=[]."
            )
        return self

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

    def context_problems(self, tokens: int) -> Iterator[tuple[str, str]]:
        """Yield the conflict with rows of `tokens` tokens, `data.context`, if there is one."""
        if tokens > self.context:
            yield (
                "data.context",
                f"{tokens} tokens are more than the model's context of {self.context}; set "
                f"model.context={tokens} or data.context={self.context}",
            )
        if self.multi_token_depth >= tokens:
            yield (
                "model.multi_token_depth",
                f"rows of data.context={tokens} have no token {self.multi_token_depth} after the "
                f"next one; set model.multi_token_depth={tokens - 1} or less",
            )

    def next_token_problems(self) -> Iterator[tuple[str, str]]:
        """Yield the options that no loss of the next token alone trains."""
        for key, found, plain in (
            ("experts.kind", self.experts.kind, "none"),
            ("multi_token_depth", self.multi_token_depth, 0),
        ):
            if found != plain:
                advice = f"is trained by experiment: language alone; set model.{key}={plain}"
                yield f"model.{key}", advice

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

    def build(self, placement: Placement = Unplaced()) -> "LanguageModel":
        """Build the model: `apply(params, {}, tokens, rng=keys)` returns logits b t v.

        `keys` are those of the rows (`jtrain.row_keys`), for dropout; `segments=` are those of
        packed rows. `LanguageModel` has the model's other functions.

        Raises:
            ConfigError: if `vocab` is still 0.
        """
        if not self.vocab:
            raise ConfigError(
                "a transformer of vocab=0 has no tokens: the experiment did not say how many its "
                "data has. Set model.vocab."
            )
        model = LanguageModel(*build_network(self, placement))
        model.config, model.placement = self, placement
        return model


class LanguageModel(Model):
    """A Model whose inputs are tokens and, of packed rows, `segments=`.

    Its `rng` are the keys of the rows, for dropout. Beside `init` and `apply` the model has

    - `hidden(params, extra, tokens, segments)` and `head(params)`, whose product is the logits
      (before `logit_cap`): for a loss that never holds the logits of a whole batch,
    - `routed(...)`: `hidden`, and the logits of the routers where there are experts,
    - `apply(..., method="multi_token")`: hidden states, routers' logits (or None), and the hidden
      states of each depth of multi-token prediction,
    - `empty(params, rows)` and `extend(params, cache, tokens, at)`: for text drawn token by token.
    """

    config: Transformer
    placement: Placement

    @property
    def context(self) -> int:
        """Most tokens that the model reads at once."""
        return self.config.context

    @property
    def logit_cap(self) -> float | None:
        """Soft cap of the logits."""
        return self.config.logit_cap

    def hidden(
        self, params: Params, extra: Extra, *inputs: Any, **named: Any
    ) -> tuple[Float[Array, "b t d"], Extra]:
        """Return the input of the head, and `extra`; arguments are those of `routed`."""
        (hidden, _), extra = self.routed(params, extra, *inputs, **named)
        return hidden, extra

    def routed(
        self,
        params: Params,
        extra: Extra,
        tokens: Int[Array, "b t"],
        segments: Int[Array, "b t"] | None = None,
        *,
        rng: Keys | None = None,
        train: bool | None = None,
    ) -> tuple[tuple[Float[Array, "b t d"], Float[Array, "b l t e"] | None], Extra]:
        """Return `hidden` with each layer's router logits (None without experts), and `extra`.

        `jtrain.losses.balance` takes the logits.
        """
        options = {"segments": segments, "rng": rng, "train": train}
        return self.apply(params, extra, tokens, **options, method="routed")

    def update_bias(
        self, extra: Extra, logits: Float[Array, "b l t e"] | None, real: Bool[Array, "b t"]
    ) -> Extra:
        """Return `extra` with the change of the experts' biases by a batch, for a stateful loss.

        A model without biases has no change. `logits` are those of `routed`.
        """
        how = self.config.experts
        if isinstance(how, NoExperts) or logits is None or how.bias_update_rate is None:
            return extra
        scores = how.scores(logits) + extra[BIAS][None, :, None]
        choices = expert_choices(scores, real, how.top_k)
        # Else the split of the biases between steps would become that of the choices.
        choices = self.placement.constrain(choices, "rows", None, "time", None)
        return {**extra, BIAS: bias_update(choices, real, how.bias_update_rate)}

    def with_bias(self, params: Params, extra: Extra) -> Params:
        """Return the parameters with the experts' biases, if any, as `extend` takes them."""
        return {**params, BIAS: extra[BIAS]} if BIAS in extra else params

    def head(self, params: Params) -> Float[Array, "v d"]:
        """Return the matrix of the logits, hidden @ head.T; the token embedding where tied."""
        return params["tokens" if self.config.tied else "head"]

    def empty(self, params: Params, rows: int) -> list[KVCache] | KVCache:
        """Return the cache of rows without a token: room for `context` keys and values a layer."""
        config, dtype = self.config, params["tokens"].dtype
        shape = (rows, config.context, config.groups, config.size_of_head)
        if config.scan:
            shape = (config.layers, *shape)
        make = lambda: KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return make() if config.scan else [make() for _ in range(config.layers)]

    def extend(
        self,
        params: Params,
        cache: list[KVCache] | KVCache,
        tokens: Int[Array, "b t"],
        at: int | Int[Array, ""],
    ) -> tuple[Float[Array, "b v"], list[KVCache] | KVCache]:
        """Return the logits after the last of `tokens`, and the cache.

        The tokens stand at the positions `at` .. `at + t - 1`. Of a model whose experts have biases
        `params` are those of `with_bias`.
        """
        at = jnp.asarray(at, jnp.int32)
        extra = {BIAS: params[BIAS]} if BIAS in params else {}
        return self.apply(params, extra, tokens, cache, at, method="extend")[0]


@functools.cache  # a run builds its model several times
def _warn_unused_tokens(vocab: int, count: int) -> None:
    _log.warning(
        f"model.vocab={vocab}, and the data has {count} different tokens: the others are never "
        f"trained. model.vocab=0 takes those of the data."
    )
