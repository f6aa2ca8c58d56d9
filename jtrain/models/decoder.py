"""The network of a decoder-only transformer."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jtrain.errors import DataError
from jtrain.models.attention import causal
from jtrain.models.dropout import drawn_from, drop
from jtrain.models.gelu import gelu
from jtrain.models.layer_norm import layer_norm
from jtrain.models.linear import Linear
from jtrain.models.transformer import Transformer
from jtrain.types import Placement

STD = 0.02  # of every kernel and embedding, as in GPT-2


class Decoder(nnx.Module):
    """Tokens to logits of the next one."""

    def __init__(self, values: Transformer, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        normal = lambda *shape: nnx.Param(STD * jax.random.normal(rngs.params(), shape))
        self.tokens = normal(values.vocab, values.width)
        self.positions = normal(values.context, values.width)
        self.blocks = nnx.List(Block(values, place, i, rngs) for i in range(values.layers))
        self.norm = Norm(values.width, bias=values.bias)
        self.head = None if values.tied else normal(values.vocab, values.width)

    def __call__(
        self, tokens: Int[Array, "b t"], keys: Shaped[Array, "b"] | None = None
    ) -> Float[Array, "b t v"]:
        """Logits at every position.

        Raises:
            DataError: if a sequence is longer than the context.
            LossError: if it shall drop and got no keys.
        """
        time, context = tokens.shape[1], self.values.context
        if time > context:
            raise DataError(
                f"a sequence of {time} tokens is longer than the model's context of {context}. "
                f"Set model.context={time}, or cut the sequences."
            )
        keys = drawn_from(keys, self.values.dropout, train=not self.deterministic)
        x = self.tokens[...][tokens] + self.positions[...][None, :time]
        x = self.place.constrain(drop(x, self.values.dropout, keys), "batch", "time", "width")
        for block in self.blocks:
            x = block(x, keys)
        head = self.tokens if self.head is None else self.head
        logits = jnp.einsum("btd,vd->btv", self.norm(x), head[...])
        return self.place.constrain(logits, "batch", "time", "vocab")


class Block(nnx.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self, values: Transformer, place: Placement, index: int, rngs: nnx.Rngs):
        self.values, self.place, self.index = values, place, index
        width, bias = values.width, values.bias
        onto = STD / math.sqrt(2 * values.layers)  # the sum over 2 x layers keeps its size
        self.norm_attention = Norm(width, bias=bias)
        self.qkv = Linear(width, 3 * width, bias=bias, std=STD, rngs=rngs)
        self.out = Linear(width, width, bias=bias, std=onto, rngs=rngs)
        self.norm_mlp = Norm(width, bias=bias)
        self.up = Linear(width, 4 * width, bias=bias, std=STD, rngs=rngs)
        self.down = Linear(4 * width, width, bias=bias, std=onto, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t d"], keys: Shaped[Array, "b"] | None
    ) -> Float[Array, "b t d"]:
        """`x` with both parts added; a row drops by its own key."""
        rate, site = self.values.dropout, 2 * self.index + 1
        x = x + drop(self.attention(self.norm_attention(x)), rate, keys, site=site)
        x = self.place.constrain(x, "batch", "time", "width")
        x = x + drop(self.mlp(self.norm_mlp(x)), rate, keys, site=site + 1)
        return self.place.constrain(x, "batch", "time", "width")

    def attention(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """What each position takes from those up to its own."""
        # Columns are heads, then query, key and value: a slice of the columns is whole heads.
        together = self.qkv(x).reshape(*x.shape[:2], self.values.heads, 3, -1)  # b t h 3 k
        # A split, whose transpose is one concatenation; indexing's would be sums of padded parts.
        q, k, v = (
            self.place.constrain(part.squeeze(3), "batch", "time", "heads", "head_size")
            for part in jnp.split(together, 3, axis=3)
        )
        return self.out(self.place.attend(causal, q, k, v).reshape(x.shape))

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """A wide layer with a bend, and back."""
        wide = self.place.constrain(self.up(x), "batch", "time", "hidden")
        return self.down(gelu(wide))


class Norm(nnx.Module):
    """LayerNorm with its scale and bias."""

    def __init__(self, width: int, *, bias: bool):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """`x`, normalised over its last dim."""
        return layer_norm(x, self.scale[...], None if self.bias is None else self.bias[...])
