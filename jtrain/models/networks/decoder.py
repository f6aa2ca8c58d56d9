"""The network of a decoder-only transformer."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.errors import DataError
from jtrain.models.attention.attention import Implementation
from jtrain.models.attention.causal import Causal
from jtrain.models.attention.kv_cache import remembering
from jtrain.models.attention.positions import LearnedPositions, Positions, Rotary
from jtrain.models.attention.rotary import RotaryAngles, local_rotary, turn_at
from jtrain.models.attention.scores import places_within, soft_cap
from jtrain.models.experts.experts import Experts
from jtrain.models.layers.block_stack import Remat, stack_modules, through
from jtrain.models.layers.dropout import KeySequence, drawn_from, drop
from jtrain.models.layers.embedding import add_positions, look_up, take_rows
from jtrain.models.layers.feed_forward import Activation
from jtrain.models.layers.norms import Norm
from jtrain.models.networks.block import STD, TransformerBlock


class Decoder(nnx.Module):
    """Tokens to logits of the next token.

    The arguments are the fields of `jtrain.models.transformer.Transformer`, with `kv_heads`,
    `head_size` and `hidden` greater than 0.

    Args:
        windows: the window of each layer; None sees all that came before.
    """

    def __init__(
        self,
        *,
        vocab: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        kv_heads: int,
        head_size: int,
        hidden: int,
        positions: Positions,
        norm: Literal["layer", "rms"],
        epsilon: float,
        activation: Activation,
        experts: Experts,
        dropout: float,
        bias: bool,
        qkv_bias: bool,
        tied: bool,
        qk_norm: bool,
        post_norm: bool,
        zero_centered: bool,
        embedding_scale: float,
        windows: tuple[int | None, ...],
        attention_cap: float | None,
        attention_scale: float | None,
        logit_cap: float | None,
        attention: Implementation,
        scan: bool,
        remat: Remat,
        saved: tuple[str, ...],
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.context, self.dropout, self.placement = context, dropout, placement
        self.rotary = positions if isinstance(positions, Rotary) else None
        self.head_size, self.windows, self.implementation = head_size, windows, attention
        self.attention_cap, self.attention_scale = attention_cap, attention_scale
        self.logit_cap, self.embedding_scale = logit_cap, embedding_scale
        self.scan, self.saved = scan, saved
        self.remat: Remat = remat
        self.deterministic = True
        draws = KeySequence(rngs.params.key[...])

        def normal(*shape: int, dims: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(STD * jax.random.normal(draws.params(), shape), dims=dims)

        learned = isinstance(positions, LearnedPositions)
        self.tokens = normal(vocab, width, dims=("vocab", "width"))
        self.positions = normal(context, width, dims=("context", "width")) if learned else None

        def make_block(rngs: KeySequence) -> TransformerBlock:
            return TransformerBlock(
                layers=layers,
                width=width,
                heads=heads,
                kv_heads=kv_heads,
                head_size=head_size,
                hidden=hidden,
                norm=norm,
                epsilon=epsilon,
                activation=activation,
                experts=experts,
                dropout=dropout,
                bias=bias,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                post_norm=post_norm,
                zero_centered=zero_centered,
                placement=placement,
                rngs=rngs,
            )

        if scan:
            self.blocks = stack_modules(make_block, layers, draws)
        else:
            self.blocks = nnx.List(make_block(draws) for _ in range(layers))
        self.norm = Norm(width, kind=norm, epsilon=epsilon, bias=bias, zero_centered=zero_centered)
        self.head = None if tied else normal(vocab, width, dims=("vocab", "width"))

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t v"]:
        """Return the logits at every position; `segments` do not see one another.

        Raises:
            DataError: if a sequence is longer than the context.
            LossError: if the network trains with dropout and `keys` is None.
        """
        return self._logits(self.hidden(tokens, keys, segments))

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Return the input of the head at every position; raise as `__call__` does."""
        return self.routed(tokens, keys, segments)[0]

    def routed(
        self,
        tokens: Int[Array, "b t"],
        keys: Shaped[Array, "b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b l t e"] | None]:
        """Return `hidden`, and the logits of every block's router; None without experts."""
        time, context = tokens.shape[1], self.context
        if time > context:
            raise DataError(
                f"a sequence of {time} tokens is longer than the model's context of {context}. "
                f"Set model.context={time}, or cut the sequences."
            )
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        at = jnp.arange(time) if segments is None else places_within(segments)
        order = self.placement.order(time)
        if order is not None:
            tokens, at = tokens[:, order], at[..., order]
            segments = None if segments is None else segments[:, order]
        x = self._embed(tokens)
        if self.positions is not None:
            plain = segments is None and order is None
            learned = self.positions[:time] if plain else self.positions[...][at]
            if segments is not None:
                x = x + learned
            elif self.placement.times == 1:
                x = add_positions(x, learned)
            else:  # the gradient of that function would be gathered where time is split
                x = x + learned[None]
        x = drop(x, self.dropout, keys, order=order)
        x = self.placement.constrain(x, "rows", "time", "width")
        angles = self._angles(at)
        row_angles = None if segments is None else angles  # angles differ by row with segments

        def call_block(block, x, rows, index, _):
            keys, segments, row_angles = rows
            attend = functools.partial(self._attend, index, segments)
            turn = self._layer_angles(index, angles if row_angles is None else row_angles)
            output = block(x, keys, index, turn, attend, order=order)
            return output.x, output.router_logits

        x, logits = through(
            self.blocks,
            x,
            call_block,
            rows=(keys, segments, row_angles),
            placement=self.placement,
            remat=self.remat,
            saved=self.saved,
        )
        return self.placement.put_back(self.norm(x)), self._by_row(logits)

    def extend(
        self, tokens: Int[Array, "b t"], cache: Any, at: Int[Array, ""]
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return the logits after the last of `tokens`, and the cache with their keys and values.

        Args:
            tokens: the new tokens, at the positions `at` .. `at + t - 1`.
            cache: keys and values of all positions before `at`, and room for the whole context.
            at: the first new position; at + t must not exceed the context.
        """
        time = tokens.shape[1]
        x = self._embed(tokens)
        if self.positions is not None:
            x = x + jax.lax.dynamic_slice_in_dim(self.positions[...], at, time)[None]
        angles = self._angles(at + jnp.arange(time, dtype=at.dtype))

        def call_block(block, x, _, index, cache):
            window = self._window(index)
            attend = remembering(
                cache, at, window=window, soft_cap=self.attention_cap, scale=self.attention_scale
            )
            turn = self._layer_angles(index, angles)
            output = block(x, None, index, turn, attend, complete_rows=False)
            return output.x, output.cache

        x, cache = through(self.blocks, x, call_block, state=cache)
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def _by_row(self, logits: Any) -> Float[Array, "b l t e"] | None:
        """Return the routers' logits of all layers, rows first, in the order of the tokens."""
        if jax.tree.leaves(logits) == []:
            return None
        logits = logits if self.scan else jnp.stack(logits)
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
        x = x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)
        x = self.placement.constrain(x, "group", "time", "split")
        return self.placement.constrain(x, "rows", "time", "width")

    def _angles(self, positions: Int[Array, "*b t"]) -> tuple[RotaryAngles, ...]:
        """Return the angles of layers without a window, then of those with one if they differ."""
        if self.rotary is None:
            return ()
        kinds = (self.rotary, *local_rotary(self.rotary))
        return tuple(turn_at(kind, self.head_size, positions) for kind in kinds)

    def _layer_angles(self, index, angles: tuple[RotaryAngles, ...]) -> RotaryAngles | None:
        if not angles:
            return None
        return angles[0] if self._window(index) is None else angles[-1]

    def _attend(self, index, segments, q, k, v):
        """Attend where the placement has the shards of q, k and v; no cache."""
        attention = Causal(
            window=self._window(index),
            soft_cap=self.attention_cap,
            scale=self.attention_scale,
            implementation=self.implementation,
        )
        return self.placement.attend(attention, q, k, v, segments), None

    def _window(self, index) -> int | None:
        # Under a scan the index is not known, and all layers have the same window.
        return self.windows[0 if self.scan else index]

    def _logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        head = self.tokens if self.head is None else self.head
        logits = jnp.einsum("btd,vd->btv", hidden, head[...])
        logits = soft_cap(logits, self.logit_cap)
        return self.placement.constrain(logits, "rows", "time", "vocab")
