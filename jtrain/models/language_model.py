"""A transformer as pure functions: the two of a Model, and the pieces they are made of."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.model import Model
from jtrain.core.placement import Placement
from jtrain.core.types import Extra, Key, Params
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.attention.kv_cache import KVCache
from jtrain.models.networks.decoder import Decoder
from jtrain.models.transformer import Transformer


class LanguageModel(Model):
    """`init` and `apply` as any Model has them (its inputs are tokens, keys of the rows where it
    drops, and segments of packed rows; the last two may be left out), and

    - `hidden(params, extra, rng, train, tokens, keys, segments)` and `head(params)`, whose product
      is the logits (before `logit_cap`): for a loss that never holds the logits of a whole batch,
    - `routed(...)`: `hidden`, and the logits of the routers where there are experts,
    - `empty(params, rows)` and `extend(params, cache, tokens, at)`: for text drawn token by token.
    """

    values: Transformer

    @property
    def context(self) -> int:
        """Tokens that it sees at once, at most."""
        return self.values.context

    def hidden(
        self,
        params: Params,
        extra: Extra,
        rng: Key | None,
        train: bool,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Extra]:
        """What the head multiplies, and `extra`; it takes and raises what `apply` does."""
        return self.apply(params, extra, rng, train, tokens, keys, segments, method="hidden")

    def routed(
        self,
        params: Params,
        extra: Extra,
        rng: Key | None,
        train: bool,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[tuple[Float[Array, "b t d"], Float[Array, "b l t e"] | None], Extra]:
        """`hidden` and the logits of each layer's router, None without experts; and `extra`.

        What `jtrain.losses.balance` reads.
        """
        return self.apply(params, extra, rng, train, tokens, keys, segments, method="routed")

    def head(self, params: Params) -> Float[Array, "v d"]:
        """The matrix that gives the logits: hidden @ head.T; the token embedding where tied."""
        return params["tokens" if self.values.tied else "head"]

    def empty(self, params: Params, rows: int) -> list[KVCache] | KVCache:
        """The cache of rows without a token: room for `context` keys and values a layer."""
        values, dtype = self.values, params["tokens"].dtype
        shape = (rows, values.context, values.groups, values.size_of_head)
        if values.scan:
            shape = (values.layers, *shape)
            return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return [
            KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(values.layers)
        ]

    def extend(
        self,
        params: Params,
        cache: list[KVCache] | KVCache,
        tokens: Int[Array, "b t"],
        at: int | Int[Array, ""],
    ) -> tuple[Float[Array, "b v"], list[KVCache] | KVCache]:
        """Logits after the last of `tokens`, which stand at `at` .. at + t - 1, and the cache."""
        at = jnp.asarray(at, jnp.int32)
        return self.apply(params, {}, None, False, tokens, cache, at, method="extend")[0]


def language_model(values: Transformer, place: Placement) -> LanguageModel:
    """The model that these values stand for."""
    model = LanguageModel(*from_nnx(lambda rngs: Decoder(values, place, rngs)))
    model.values = values
    return model
