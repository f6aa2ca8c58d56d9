"""The network of a decoder-only transformer."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.errors import DataError
from jtrain.models.attention import places_within, remembering, soft_cap
from jtrain.models.attention.blockwise import Causal
from jtrain.models.attention.rotary import (
    LearnedPositions,
    Rotary,
    RotaryAngles,
    local_rotary,
    rotary_angles,
    rotate,
)
from jtrain.models.experts import NoExperts
from jtrain.models.layers.block_stack import stack_modules, through
from jtrain.models.layers.dropout import KeySequence, drawn_from, drop
from jtrain.models.layers.embedding import add_positions, look_up, take_rows
from jtrain.models.layers.feed_forward import GATED, MixtureOfExperts, activate
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm
from jtrain.models.transformer import Transformer

STD = 0.02  # of every kernel and embedding, as in GPT-2
# (q, k, v) -> b t h k, and the cache for later tokens or None.
Attend: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Any]]


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
        self.norm = _norm(config, config.width)
        self.head = None if config.tied else normal(config.vocab, "vocab", "width")

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
        time, context = tokens.shape[1], self.config.context
        if time > context:
            raise DataError(
                f"a sequence of {time} tokens is longer than the model's context of {context}. "
                f"Set model.context={time}, or cut the sequences."
            )
        rate = self.config.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
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
        x = drop(x, rate, keys, order=order)
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
            remat=self.config.remat,
            saved=self.config.saved,
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
                cache,
                at,
                window=window,
                soft_cap=self.config.attention_cap,
                scale=self.config.attention_scale,
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
        x = (
            x
            if self.config.embedding_scale == 1
            else x * jnp.asarray(self.config.embedding_scale, x.dtype)
        )
        x = self.placement.constrain(x, "group", "time", "split")
        return self.placement.constrain(x, "rows", "time", "width")

    def _angles(self, positions: Int[Array, "*b t"]) -> tuple[RotaryAngles, ...]:
        """Return the angles of layers without a window, then of those with one if they differ."""
        if self.rotary is None:
            return ()
        kinds = (self.rotary, *local_rotary(self.rotary))
        return tuple(rotary_angles(kind, self.config.size_of_head, positions) for kind in kinds)

    def _layer_angles(self, index, angles: tuple[RotaryAngles, ...]) -> RotaryAngles | None:
        if not angles:
            return None
        return angles[0] if self._window(index) is None else angles[-1]

    def _attend(self, index, segments, q, k, v):
        """Attend where the placement has the shards of q, k and v; no cache."""
        attention = Causal(
            window=self._window(index),
            soft_cap=self.config.attention_cap,
            scale=self.config.attention_scale,
            implementation=self.config.attention,
        )
        return self.placement.attend(attention, q, k, v, segments), None

    def _window(self, index) -> int | None:
        # Under a scan the index is not known, and all layers have the same window.
        return self.config.window_of(0 if self.config.scan else index)

    def _logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        head = self.tokens if self.head is None else self.head
        logits = jnp.einsum("btd,vd->btv", hidden, head[...])
        logits = soft_cap(logits, self.config.logit_cap)
        return self.placement.constrain(logits, "rows", "time", "vocab")


class BlockOutput(NamedTuple):
    """The output of a block, its cache and its router's logits."""

    x: Array  # b t d
    cache: Any  # as `attend` returns it
    router_logits: Array | None  # b t e; None without experts


class TransformerBlock(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to its input.

    With `post_norm` the output of each is normalised before it is added.
    """

    def __init__(self, config: Transformer, placement: Placement, rngs: KeySequence):
        self.config, self.placement = config, placement
        width, hidden, head_size = config.width, config.size_of_hidden, config.size_of_head
        std_out = STD / math.sqrt(2 * config.layers)  # the sum over 2 x layers keeps its size

        def linear(
            inputs: int, outputs: int, *dims: str, std: float = STD, bias: bool = config.bias
        ) -> Linear:
            flat = placement.times == 1
            return Linear(
                inputs, outputs, bias=bias, std=std, dims=(dims[0], dims[1]), flat=flat, rngs=rngs
            )

        make_norm = functools.partial(_norm, config)
        self.norm_attention = make_norm(width)
        columns = (config.heads + 2 * config.groups) * head_size
        biased = config.bias or config.qkv_bias
        self.qkv = linear(width, columns, "width", "kv_heads", bias=biased)
        self.norm_q = make_norm(head_size) if config.qk_norm else None
        self.norm_k = make_norm(head_size) if config.qk_norm else None
        self.out = linear(config.heads * head_size, width, "heads", "width", std=std_out)
        self.norm_mlp = make_norm(width)
        self.norm_attention_out = make_norm(width) if config.post_norm else None
        self.norm_mlp_out = make_norm(width) if config.post_norm else None
        self.mixture = (
            None
            if isinstance(config.experts, NoExperts)
            else MixtureOfExperts(
                experts=config.experts,
                width=width,
                hidden=hidden,
                activation=config.activation,
                std=STD,
                std_out=std_out,
                placement=placement,
                rngs=rngs,
            )
        )
        if self.mixture is not None:
            return
        gated = config.activation in GATED
        self.gate = linear(width, hidden, "width", "hidden") if gated else None
        self.up = linear(width, hidden, "width", "hidden")
        self.down = linear(hidden, width, "hidden", "width", std=std_out)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        keys: Shaped[Array, "b"] | None,
        index: int | Int[Array, ""],
        angles: RotaryAngles | None,
        attend: Attend,
        *,
        complete_rows: bool = True,
        order: np.ndarray | None = None,
    ) -> BlockOutput:
        """Return `x` with both parts added; a row drops by its own key.

        Args:
            x: the input of the block.
            keys: one a row, for dropout; None drops nothing.
            index: the number of the layer, from 0.
            angles: of rotary positions, if the model has them.
            attend: attention of q, k and v.
            complete_rows: False for tokens that continue cached ones.
            order: the position of each token of `x`, where they are permuted.
        """
        drop_rows = functools.partial(drop, rate=self.config.dropout, keys=keys, order=order)
        site = 2 * index + 1
        attended, cache = self.attention(self.norm_attention(x), angles, attend)
        attended = (
            attended if self.norm_attention_out is None else self.norm_attention_out(attended)
        )
        x = x + drop_rows(attended, site=site)
        x = self.placement.constrain(x, "batch", "time", "width")
        x_mlp, router_logits = self.norm_mlp(x), None
        if self.mixture is None:
            y = self.mlp(x_mlp)
        else:
            y, router_logits = self.mixture(x_mlp, complete_rows=complete_rows, order=order)
        y = y if self.norm_mlp_out is None else self.norm_mlp_out(y)
        x = x + drop_rows(y, site=site + 1)
        x = self.placement.constrain(x, "batch", "time", "width")
        return BlockOutput(x, cache, router_logits)

    def attention(
        self, x: Float[Array, "b t d"], angles: RotaryAngles | None, attend: Attend
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Return the attention of each position to those up to its own, and the cache."""
        heads, kv_heads = self.config.heads, self.config.groups
        shared = heads // kv_heads  # query heads that share a key and a value
        # Columns are groups, then queries, key and value: a slice of the columns is complete
        # groups.
        qkv = checkpoint_name(self.qkv(x), "qkv")
        qkv = qkv.reshape(*x.shape[:2], kv_heads, shared + 2, -1)  # b t g shared+2 k
        qkv = self.placement.constrain(qkv, "batch", "time", "kv_heads", None, None)
        # The transpose of a split is one concatenation; of indexing, sums of padded arrays.
        q, k, v = jnp.split(qkv, (shared, shared + 1), axis=3)
        q = self._prepare(q.reshape(*q.shape[:2], heads, -1), self.norm_q, angles)
        k = self._prepare(k.squeeze(3), self.norm_k, angles)
        v = self._prepare(v.squeeze(3), None, None)
        attended, cache = attend(q, k, v)
        attended = checkpoint_name(attended.reshape(*x.shape[:2], -1), "attention")
        return self.out(attended), cache

    def _prepare(
        self, x: Float[Array, "b t h k"], norm: Norm | None, angles: RotaryAngles | None
    ) -> Float[Array, "b t h k"]:
        """Normalise and rotate `x` where the model does, and constrain its sharding."""
        x = x if norm is None else norm(x)
        x = x if angles is None else rotate(x, angles)
        heads = "heads" if x.shape[2] == self.config.heads else "kv_heads"
        return self.placement.constrain(x, "batch", "time", heads, "head_size")

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the MLP: a wide layer with its activation."""

        def wide(layer: Linear) -> Array:
            y = self.placement.constrain(layer(x), "batch", "time", "hidden")
            return checkpoint_name(y, "hidden")

        gate = None if self.gate is None else wide(self.gate)
        return self.down(activate(self.config.activation, wide(self.up), gate))


def _norm(config: Transformer, width: int) -> Norm:
    return Norm(
        width,
        kind=config.norm,
        epsilon=config.epsilon,
        bias=config.bias,
        zero_centered=config.zero_centered,
    )
