"""A transformer as pure functions: the `init` and `apply` of a Model, and the parts of `apply`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.core.model import Model
from jtrain.core.types import Extra, Keys, Params
from jtrain.models.attention.kv_cache import KVCache


class LanguageModel(Model):
    """A Model whose inputs are tokens and, of packed rows, `segments=`.

    Its `rng` are the keys of the rows, for dropout. Beside `init` and `apply` the model has

    - `hidden(params, extra, tokens, segments)` and `head(params)`, whose product is the logits
      (before `logit_cap`): for a loss that never holds the logits of a whole batch,
    - `routed(...)`: `hidden`, and the logits of the routers where there are experts,
    - `empty(params, rows)` and `extend(params, cache, tokens, at)`: for text drawn token by token.
    """

    context: int
    """Most tokens that the model reads at once."""
    layers: int
    kv_heads: int
    head_size: int
    tied: bool
    scan: bool
    logit_cap: float | None

    def hidden(
        self,
        params: Params,
        extra: Extra,
        tokens: Int[Array, "b t"],
        segments: Int[Array, "b t"] | None = None,
        *,
        rng: Keys | None = None,
        train: bool | None = None,
    ) -> tuple[Float[Array, "b t d"], Extra]:
        """Return the input of the head, and `extra`; arguments and errors are those of `apply`."""
        options = {"segments": segments, "rng": rng, "train": train}
        return self.apply(params, extra, tokens, **options, method="hidden")

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

    def head(self, params: Params) -> Float[Array, "v d"]:
        """Return the matrix of the logits, hidden @ head.T; the token embedding where tied."""
        return params["tokens" if self.tied else "head"]

    def empty(self, params: Params, rows: int) -> list[KVCache] | KVCache:
        """Return the cache of rows without a token: room for `context` keys and values a layer."""
        dtype = params["tokens"].dtype
        shape = (rows, self.context, self.kv_heads, self.head_size)
        if self.scan:
            shape = (self.layers, *shape)
            return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return [
            KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.layers)
        ]

    def extend(
        self,
        params: Params,
        cache: list[KVCache] | KVCache,
        tokens: Int[Array, "b t"],
        at: int | Int[Array, ""],
    ) -> tuple[Float[Array, "b v"], list[KVCache] | KVCache]:
        """Return the logits after the last of `tokens`, and the cache.

        The tokens stand at the positions `at` .. `at + t - 1`.
        """
        at = jnp.asarray(at, jnp.int32)
        return self.apply(params, {}, tokens, cache, at, method="extend")[0]


def build_language_model(
    parts: Model,
    *,
    context: int,
    layers: int,
    kv_heads: int,
    head_size: int,
    tied: bool,
    scan: bool,
    logit_cap: float | None,
) -> LanguageModel:
    """Build the model of a decoder's `init` and `apply`, which has these fields."""
    model = LanguageModel(*parts)
    model.context, model.layers = context, layers
    model.kv_heads, model.head_size = kv_heads, head_size
    model.tied, model.scan, model.logit_cap = tied, scan, logit_cap
    return model
