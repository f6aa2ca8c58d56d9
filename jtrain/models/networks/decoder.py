"""The network of a decoder-only transformer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.errors import DataError
from jtrain.models.attention.causal import Causal
from jtrain.models.attention.kv_cache import remembering
from jtrain.models.attention.positions import Rotary
from jtrain.models.attention.rotary import RotaryAngles, turn_at
from jtrain.models.attention.segments import places_within
from jtrain.models.attention.soft_cap import soft_cap
from jtrain.models.layers.block_stack import stacked, through
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.embedding import look_up
from jtrain.models.layers.key_sequence import KeySequence
from jtrain.models.layers.norms import Norm
from jtrain.models.networks.block import STD, TransformerBlock
from jtrain.models.transformer import Transformer


class Decoder(nnx.Module):
    """Tokens to logits of the next one."""

    def __init__(self, values: Transformer, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        draws = KeySequence(rngs.params.key[...])
        normal = lambda *shape, dims: nnx.Param(
            STD * jax.random.normal(draws.params(), shape), dims=dims
        )
        learned = values.positions.kind == "learned"
        self.tokens = normal(values.vocab, values.width, dims=("vocab", "width"))
        places = lambda: normal(values.context, values.width, dims=("context", "width"))
        self.positions = places() if learned else None
        block = functools.partial(TransformerBlock, values, place)
        if values.scan:
            self.blocks = stacked(block, values.layers, draws)
        else:
            self.blocks = nnx.List(block(draws) for _ in range(values.layers))
        self.norm = Norm(values.width, kind=values.norm, epsilon=values.epsilon, bias=values.bias)
        head = lambda: normal(values.vocab, values.width, dims=("vocab", "width"))
        self.head = None if values.tied else head()

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t v"]:
        """Logits at every position; with `segments` those of each segment by itself.

        Raises:
            DataError: if a sequence is longer than the context.
            LossError: if it shall drop and got no keys.
        """
        return self._logits(self.hidden(tokens, keys, segments))

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """What the head multiplies at every position; raises what the whole raises."""
        return self.routed(tokens, keys, segments)[0]

    def routed(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b l t e"] | None]:
        """`hidden`, and the logits of every block's router; None where there are no experts."""
        time, context = tokens.shape[1], self.values.context
        if time > context:
            raise DataError(
                f"a sequence of {time} tokens is longer than the model's context of {context}. "
                f"Set model.context={time}, or cut the sequences."
            )
        keys = drawn_from(keys, self.values.dropout, train=not self.deterministic)
        at = jnp.arange(time) if segments is None else places_within(segments)
        order = self.place.order(time)
        if order is not None:
            tokens, at = tokens[:, order], at[..., order]
            segments = None if segments is None else segments[:, order]
        x = self._embedded(tokens)
        if self.positions is not None:
            plain = segments is None and order is None
            learned = self.positions[:time] if plain else self.positions[...][at]
            x = x + (learned[None] if segments is None else learned)
        x = drop(x, self.values.dropout, keys, order=order)
        x = self.place.constrain(x, "rows", "time", "width")
        turn = self._turn(at)
        own = None if segments is None else turn  # the same for all rows, or each row's

        def each(block, x, rows, index, _):
            keys, segments, own = rows
            attend = functools.partial(self._attend, index, segments)
            passed = block(x, keys, index, turn if own is None else own, attend, order=order)
            return passed.x, passed.routed

        x, routed = through(
            self.blocks,
            x,
            each,
            rows=(keys, segments, own),
            place=self.place,
            remat=self.values.remat,
            saved=self.values.saved,
        )
        return self.place.put_back(self.norm(x)), self._by_row(routed)

    def extend(
        self, tokens: Int[Array, "b t"], cache: Any, at: Int[Array, ""]
    ) -> tuple[Float[Array, "b v"], Any]:
        """Logits after the last of `tokens`, which stand at `at` .. `at + t - 1`, and the cache.

        Args:
            tokens: what is new.
            cache: keys and values of all positions before `at`, and room for the whole context.
            at: the first position that is new; at + t must not exceed the context.
        """
        time = tokens.shape[1]
        x = self._embedded(tokens)
        if self.positions is not None:
            x = x + jax.lax.dynamic_slice_in_dim(self.positions[...], at, time)[None]
        turn = self._turn(at + jnp.arange(time, dtype=at.dtype))

        def each(block, x, _, index, kept):
            window = self._window(index)
            attend = remembering(kept, at, window=window, soft_cap=self.values.attention_cap)
            passed = block(x, None, index, turn, attend, whole=False)
            return passed.x, passed.kept

        x, cache = through(self.blocks, x, each, kept=cache)
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def _by_row(self, routed: Any) -> Float[Array, "b l t e"] | None:
        if self.values.experts.kind == "none":
            return None
        routed = routed if self.values.scan else jnp.stack(routed)
        layers, b, t, _ = routed.shape
        flat = jnp.moveaxis(routed, 0, 2).reshape(b, t, -1)  # b t (l e)
        return jnp.moveaxis(self.place.put_back(flat).reshape(b, t, layers, -1), 2, 1)

    def _embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Their rows of the table; where its width is split, each device looks up its part.

        The parts are exchanged then: less than the whole table would be.
        """
        # Split over devices, each sums its own tokens, and blocks would only be exchanged.
        whole = self.place.rows * self.place.times == 1
        x = look_up(self.tokens[...], tokens) if whole else self.tokens[...][tokens]
        x = self.place.constrain(x, "group", "time", "split")
        return self.place.constrain(x, "rows", "time", "width")

    def _turn(self, positions: Int[Array, "*b t"]) -> RotaryAngles | None:
        how = self.values.positions
        return (
            turn_at(how, self.values.size_of_head, positions) if isinstance(how, Rotary) else None
        )

    def _attend(self, index, segments, q, k, v):
        """Attention where the placement has its parts; nothing is kept."""
        how = Causal(
            window=self._window(index),
            soft_cap=self.values.attention_cap,
            implementation=self.values.attention,
        )
        return self.place.attend(how, q, k, v, segments), None

    def _window(self, index) -> int | None:
        # Under a scan the index is not known, and all layers have the same window.
        return self.values.window if self.values.scan else self.values.window_of(index)

    def _logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        head = self.tokens if self.head is None else self.head
        logits = jnp.einsum("btd,vd->btv", hidden, head[...])
        logits = soft_cap(logits, self.values.logit_cap)
        return self.place.constrain(logits, "rows", "time", "vocab")
