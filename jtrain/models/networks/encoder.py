"""The network of a text encoder."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.errors import ConfigError, DataError
from jtrain.models.attention.full import FullAttention
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.embedding import add_positions, look_up
from jtrain.models.layers.feed_forward import Activation, bend
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm

STD = 0.02  # of every kernel and embedding, as in BERT


class TextEncoder(nnx.Module):
    """Tokens to a vector at each position.

    The arguments are the fields of `jtrain.models.encoder.Encoder`, with `hidden` above 0.
    """

    def __init__(
        self,
        *,
        vocab: int,
        context: int,
        token_types: int,
        layers: int,
        heads: int,
        width: int,
        hidden: int,
        epsilon: float,
        activation: Activation,
        pooler: bool,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.context, self.dropout, self.placement = context, dropout, placement
        self.deterministic = True

        def normal(rows: int, *dims: str) -> nnx.Param:
            return nnx.Param(STD * jax.random.normal(rngs.params(), (rows, width)), dims=dims)

        self.tokens = normal(vocab, "vocab", "width")
        self.positions = normal(context, "context", "width")
        self.types = normal(token_types, "types", "width")
        self.norm = Norm(width, kind="layer", epsilon=epsilon, bias=True)
        self.blocks = nnx.List(
            EncoderBlock(
                index,
                width=width,
                heads=heads,
                hidden=hidden,
                epsilon=epsilon,
                activation=activation,
                dropout=dropout,
                placement=placement,
                rngs=rngs,
            )
            for index in range(layers)
        )
        dims = ("width", None)
        self.pooler = Linear(width, width, std=STD, dims=dims, rngs=rngs) if pooler else None

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        visible: Bool[Array, "b t"] | None = None,
        types: Int[Array, "b t"] | None = None,
        keys: Shaped[Array, "b"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Return the vector of each position.

        Args:
            tokens: numbers of the vocabulary.
            visible: which positions are text and not padding; None: all.
            types: the part of the text, 0 or 1, that a token belongs to; None: all 0.
            keys: of the rows, for dropout.

        Raises:
            DataError: if a text is longer than the context.
            LossError: if the network trains with dropout and `keys` is None.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise DataError(
                f"a text of {time} tokens is longer than the model's context of {self.context}. "
                f"Cut the texts."
            )
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        # Padding is a segment of its own, which no text sees.
        segments = None if visible is None else visible.astype(jnp.int32)
        kinds = self.types[:1][None] if types is None else look_up(self.types[...], types)
        x = add_positions(look_up(self.tokens[...], tokens), self.positions[:time]) + kinds
        x = drop(self.norm(x), self.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        for block in self.blocks:
            x = block(x, segments, keys)
        return x

    def pooled(
        self,
        tokens: Int[Array, "b t"],
        visible: Bool[Array, "b t"] | None = None,
        types: Int[Array, "b t"] | None = None,
        keys: Shaped[Array, "b"] | None = None,
    ) -> Float[Array, "b d"]:
        """Return tanh of a linear map of the first position's vector.

        Raises:
            ConfigError: if the model has no pooler.
            DataError: as `__call__`.
        """
        if self.pooler is None:
            raise ConfigError(
                'method="pooled" is of a model that has a pooler. Set model.pooler=true, or '
                "take the mean of the vectors: jtrain.models.embeddings.mean_pool."
            )
        return jnp.tanh(self.pooler(self(tokens, visible, types, keys)[:, 0]))


class EncoderBlock(nnx.Module):
    """Attention, then an MLP, each added to its input and then normalised."""

    def __init__(
        self,
        index: int,
        *,
        width: int,
        heads: int,
        hidden: int,
        epsilon: float,
        activation: Activation,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.index, self.heads, self.dropout, self.placement = index, heads, dropout, placement
        self.activation: Activation = activation
        linear = functools.partial(Linear, std=STD, rngs=rngs)
        norm = functools.partial(Norm, kind="layer", epsilon=epsilon, bias=True)
        self.qkv = linear(width, 3 * width, dims=("width", "heads"))
        self.out = linear(width, width, dims=("heads", "width"))
        self.norm_attention = norm(width)
        self.up = linear(width, hidden, dims=("width", "hidden"))
        self.down = linear(hidden, width, dims=("hidden", "width"))
        self.norm_mlp = norm(width)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        segments: Int[Array, "b t"] | None,
        keys: Shaped[Array, "b"] | None,
    ) -> Float[Array, "b t d"]:
        """Return `x` with both parts added and normalised; a row drops by its own key."""
        site = 2 * self.index + 1
        attended = drop(self.attention(x, segments), self.dropout, keys, site=site)
        x = self.placement.constrain(self.norm_attention(x + attended), "batch", "time", "width")
        y = drop(self.mlp(x), self.dropout, keys, site=site + 1)
        return self.placement.constrain(self.norm_mlp(x + y), "batch", "time", "width")

    def attention(
        self, x: Float[Array, "b t d"], segments: Int[Array, "b t"] | None
    ) -> Float[Array, "b t d"]:
        """Return the attention of each position to all of its segment."""
        # Columns are heads, then query, key and value: a slice of the columns is complete heads.
        qkv = self.qkv(x).reshape(*x.shape[:2], self.heads, 3, -1)  # b t h 3 k
        q, k, v = (
            self.placement.constrain(part.squeeze(3), "batch", "time", "heads", "head_size")
            for part in jnp.split(qkv, 3, axis=3)
        )
        return self.out(self.placement.attend(FullAttention(), q, k, v, segments).reshape(x.shape))

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the MLP."""
        wide = self.placement.constrain(self.up(x), "batch", "time", "hidden")
        return self.down(bend(self.activation, wide, None))
