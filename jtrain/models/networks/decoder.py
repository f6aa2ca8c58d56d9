"""The network of a decoder-only transformer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jtrain.core.placement import Placement
from jtrain.errors import DataError
from jtrain.models.attention import places_within, soft_cap
from jtrain.models.attention.blockwise import Causal, remembering
from jtrain.models.attention.rotary import (
    LearnedPositions,
    Rotary,
    RotaryAngles,
    rotary_angles,
)
from jtrain.models.experts import NoExperts
from jtrain.models.layers.block_stack import stack_modules, through
from jtrain.models.layers.dropout import KeySequence, drawn_from, drop
from jtrain.models.layers.linear import Linear, add_positions, look_up, take_rows
from jtrain.models.networks.block import STD, Keys, Norm, Segments, TransformerBlock
from jtrain.models.transformer import Transformer
from jtrain.parallel.explicit import gathered, is_explicit, keeps_split, product


class PredictionDepth(nnx.Module):
    """A depth of multi-token prediction: a map of two vectors to one, and a block without experts.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 21 and 22.
    """

    def __init__(self, config: Transformer, placement: Placement, rngs: KeySequence):
        width, flat = config.width, placement.times == 1
        self.norm_hidden, self.norm_token = Norm(config), Norm(config)
        dims = ("width", "width")
        self.join = Linear(2 * width, width, bias=False, dims=dims, flat=flat, rngs=rngs)
        self.block = TransformerBlock(
            dataclasses.replace(config, experts=NoExperts()), placement, rngs
        )

    def __call__(
        self, x: Float[Array, "b t d"], token: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        """Return the input of the block, from the output of the depth before and an embedding."""
        return self.join(jnp.concatenate([self.norm_hidden(x), self.norm_token(token)], -1))


class Decoder(nnx.Module):
    """Tokens to logits of the next token."""

    def __init__(self, config: Transformer, placement: Placement, rngs: nnx.Rngs):
        self.config, self.placement = config, placement
        self.rotary = config.positions if isinstance(config.positions, Rotary) else None
        self.deterministic = True
        draws = KeySequence(rngs.params.key[...])

        def normal(rows: int, *dims: str) -> nnx.Param:
            value = STD * jax.random.normal(draws.params(), (rows, config.width))
            return nnx.Param(value, dims=dims)

        learned = isinstance(config.positions, LearnedPositions)
        self.tokens = normal(config.vocab, "vocab", "width")
        self.positions = normal(config.context, "context", "width") if learned else None
        make_block = functools.partial(TransformerBlock, config, placement)
        if config.scan:
            self.blocks = stack_modules(make_block, config.layers, draws)
        else:
            self.blocks = nnx.List(make_block(draws) for _ in range(config.layers))
        depths = config.multi_token_depth
        self.depths = nnx.List(PredictionDepth(config, placement, draws) for _ in range(depths))
        biased = config.experts.bias_update_rate is not None
        shape = config.layers, getattr(config.experts, "count", 0)
        self.expert_bias = nnx.Variable(jnp.zeros(shape)) if biased else None
        self.norm = Norm(config)
        self.head = None if config.tied else normal(config.vocab, "vocab", "width")

    def __call__(
        self, tokens: Int[Array, "b t"], keys: Keys = None, segments: Segments = None
    ) -> Float[Array, "b t v"]:
        """Return the logits at every position; `segments` do not see one another."""
        return self._logits(self.routed(tokens, keys, segments)[0])

    def routed(
        self, tokens: Int[Array, "b t"], keys: Keys = None, segments: Segments = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b l t e"] | None]:
        """Return the input of the head, and the logits of every block's router, if any."""
        return self._forward(tokens, keys, segments, nnx.List())[:2]

    def multi_token(
        self, tokens: Int[Array, "b t"], keys: Keys = None, segments: Segments = None
    ) -> tuple[Array, Array | None, list[Float[Array, "b t d"]]]:
        """Return what `routed` does, and the input of the head at each depth.

        Depth k reads at position i the output of depth k - 1 and the token i + k, and predicts the
        one after it. The last k positions, for which there is none, have no meaning.
        """
        return self._forward(tokens, keys, segments, self.depths)

    def _forward(
        self, tokens: Int[Array, "b t"], keys: Keys, segments: Segments, depths: nnx.Module
    ) -> tuple[Array, Array | None, list[Array]]:
        time, context = tokens.shape[1], self.config.context
        if time > context:
            raise DataError(
                f"a sequence of {time} tokens is longer than the model's context of {context}. "
                f"Set model.context={time}, or cut the sequences."
            )
        rate = self.config.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
        at = jnp.arange(time) if segments is None else places_within(segments)
        order, given = self.placement.order(time), tokens
        if order is not None:
            tokens, at = tokens[:, order], at[..., order]
            segments = None if segments is None else segments[:, order]
        x = self._embed(tokens)
        if self.positions is not None:
            plain = segments is None and order is None
            table = gathered(self.positions[...])
            vectors = lambda at, table: table[at]
            learned = table[:time] if plain else keeps_split(vectors, at.ndim)(at, table)
            if segments is not None:
                x = x + learned
            elif self.placement.times == 1 and not is_explicit():
                # Whole: XLA knows no way from time, split by a tensor axis, to the table's split.
                x = add_positions(x, self.placement.constrain(learned, None, "width"))
            else:  # the gradient of that function would be gathered where time is split
                x = x + learned[None]
        x = drop(x, rate, keys, order=order)
        x = self.placement.constrain(x, "rows", "time", "width")
        angles = self._angles(at)
        row_angles = None if segments is None else angles  # angles differ by row with segments

        def call_block(block, x, rows, index, _):
            keys, segments, row_angles = rows
            attend = functools.partial(self._attend, index, segments)
            turn = self._layer_angles(index, angles if row_angles is None else row_angles)
            bias = self._bias(block, index)
            output = block(x, keys, index, turn, attend, order=order, bias=bias)
            return output.x, output.router_logits

        def call_depth(depth, x, rows, index, _):
            later = jnp.roll(given, -(index + 1), axis=1)
            x = depth(x, self._embed(later if order is None else later[:, order]))
            x, _ = call_block(depth.block, x, rows, self.config.layers + index, None)
            return x, self._head_input(x)

        run = functools.partial(
            through,
            rows=(keys, segments, row_angles),
            placement=self.placement,
            remat=self.config.remat,
            saved=self.config.saved,
        )
        x, logits = run(self.blocks, x, call_block)
        _, further = run(depths, x, call_depth)
        return self._head_input(x), self._by_row(logits), further

    def _head_input(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return self.placement.put_back(self.norm(x))

    def _bias(self, block: TransformerBlock, index: Any) -> Float[Array, "e"] | None:
        if self.expert_bias is None or block.mixture is None:
            return None
        return self.expert_bias[...][index]

    def extend(
        self, tokens: Int[Array, "b t"], cache: Any, at: Int[Array, ""]
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return the logits after the last of `tokens`, and the cache with their keys and values.

        The tokens stand at the positions `at` .. `at + t - 1`, which must lie within the context.
        """
        time = tokens.shape[1]
        x = self._embed(tokens)
        if self.positions is not None:
            x = x + jax.lax.dynamic_slice_in_dim(self.positions[...], at, time)[None]
        angles = self._angles(at + jnp.arange(time, dtype=at.dtype))

        def call_block(block, x, _, index, cache):
            attend = remembering(cache, at, self._causal(index))
            turn = self._layer_angles(index, angles)
            bias = self._bias(block, index)
            output = block(x, None, index, turn, attend, complete_rows=False, bias=bias)
            return output.x, output.cache

        x, cache = through(self.blocks, x, call_block, state=cache)
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def _by_row(self, logits: Any) -> Float[Array, "b l t e"] | None:
        """Return the routers' logits of all layers, rows first, in the order of the tokens."""
        if jax.tree.leaves(logits) == []:
            return None
        logits = logits if self.config.scan else jnp.stack(logits)
        layers, b, t, _ = logits.shape
        flat = jnp.moveaxis(logits, 0, 2).reshape(b, t, -1)  # b t (l e)
        return jnp.moveaxis(self.placement.put_back(flat).reshape(b, t, layers, -1), 2, 1)

    def _embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look up the embeddings; a device that has a shard of the width looks up that shard.

        The shards of the result are exchanged: less than the whole table would be.
        """
        # Split over devices, each device sums over its own tokens: blocks would only add
        # exchanges.
        single = self.placement.rows * self.placement.times == 1
        x = look_up(self.tokens[...], tokens) if single else take_rows(self.tokens[...], tokens)
        if (scale := self.config.embedding_scale) != 1:
            x = x * jnp.asarray(scale, x.dtype)
        if not is_explicit():  # else the table is whole
            x = self.placement.constrain(x, "group", "time", "split")
        return self.placement.constrain(x, "rows", "time", "width")

    def _angles(self, positions: Int[Array, "*b t"]) -> tuple[RotaryAngles, ...]:
        """Return the angles of layers without a window, then of those with one if they differ."""
        if self.rotary is None:
            return ()
        local = self.rotary.local_base
        kinds = (self.rotary,) if local is None else (self.rotary, Rotary(base=local))
        return tuple(rotary_angles(kind, self.config.size_of_head, positions) for kind in kinds)

    def _layer_angles(self, index, angles: tuple[RotaryAngles, ...]) -> RotaryAngles | None:
        if not angles:
            return None
        return angles[0] if self._window(index) is None else angles[-1]

    def _attend(self, index, segments, q, k, v):
        """Attend where the placement has the shards of q, k and v; no cache."""
        return self.placement.attend(self._causal(index), q, k, v, segments), None

    def _causal(self, index) -> Causal:
        config = self.config
        window, cap, scale = self._window(index), config.attention_cap, config.attention_scale
        return Causal(window, cap, scale, config.attention)

    def _window(self, index) -> int | None:
        # Under a scan the index is not known, and all layers have the same window.
        return self.config.window_of(0 if self.config.scan else index)

    def _logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        head = self.tokens if self.head is None else self.head
        logits = product(hidden, head[...], 1)
        logits = soft_cap(logits, self.config.logit_cap)
        # Over explicit axes whole, as a loss takes them that looks up the logit of a label.
        return self.placement.constrain(logits, "rows", "time", None if is_explicit() else "vocab")
