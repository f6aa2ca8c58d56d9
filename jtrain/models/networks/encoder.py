"""Networks whose positions see one another: a vision transformer and a text encoder."""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.errors import ConfigError, DataError
from jtrain.models.attention import FullAttention
from jtrain.models.encoder import Encoder
from jtrain.models.images import as_images
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.embedding import add_positions, look_up
from jtrain.models.layers.feed_forward import activate
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm
from jtrain.models.vit import ViT

STD = 0.02  # of every kernel and embedding, as in BERT
Keys: TypeAlias = Shaped[Array, "b"] | None
Segments: TypeAlias = Int[Array, "b t"] | None


class ViTModule(nnx.Module):
    """Images to logits."""

    def __init__(self, config: ViT, placement: Placement, rngs: nnx.Rngs):
        self.config, self.placement = config, placement
        self.deterministic = True
        width = config.width

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(STD * jax.random.normal(rngs.params(), shape))

        numbers = config.patch**2 * config.shape[2]
        self.patches = Linear(numbers, width, std=STD, dims=(None, "width"), rngs=rngs)
        self.token = normal(width) if config.pool == "class" else None
        self.positions = normal(config.positions, width)
        self.blocks = nnx.List(
            EncoderBlock(config, index, placement, rngs) for index in range(config.layers)
        )
        self.norm = _norm(config)
        self.head = Linear(width, config.classes, std=STD, dims=("width", "classes"), rngs=rngs)

    def __call__(
        self, x: Num[Array, "b *s"], keys: Keys = None, mask: Bool[Array, "b"] | None = None
    ) -> Float[Array, "b c"]:
        """Return the logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if the network trains with dropout and `keys` is None.
        """
        config = self.config
        keys = drawn_from(keys, config.dropout, train=not self.deterministic)
        x = as_images(x, config.image, self.positions[...].dtype, mask, config.pixels)
        x = self.patches(cut(x, config.patch))  # b t d
        if self.token is not None:
            first = jnp.broadcast_to(self.token[...][None, None], (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([first, x], 1)
        x = drop(add_positions(x, self.positions[...]), config.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        for block in self.blocks:
            x = block(x, keys)
        # Where the head reads the class token alone, no other position needs the last norm.
        x = self.norm(x if self.token is None else x[:, :1])
        x = self.placement.constrain(at_least_f32(x).mean(1).astype(x.dtype), "batch", "width")
        return self.placement.constrain(self.head(x), "batch", "classes")


def cut(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b t p"]:
    """Return the patches of each image, row by row; p runs over rows, columns, channels.

    A linear map of the patches is the convolution with a kernel and a stride of `patch`.
    """
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c).swapaxes(2, 3)
    return x.reshape(b, -1, patch * patch * c)


class TextEncoder(nnx.Module):
    """Tokens to a vector at each position."""

    def __init__(self, config: Encoder, placement: Placement, rngs: nnx.Rngs):
        self.config, self.placement = config, placement
        self.deterministic = True
        width = config.width

        def normal(rows: int, *dims: str) -> nnx.Param:
            return nnx.Param(STD * jax.random.normal(rngs.params(), (rows, width)), dims=dims)

        self.tokens = normal(config.vocab, "vocab", "width")
        self.positions = normal(config.context, "context", "width")
        self.types = normal(config.token_types, "types", "width")
        self.norm = _norm(config)
        self.blocks = nnx.List(
            EncoderBlock(config, index, placement, rngs) for index in range(config.layers)
        )
        pooler: Any = {"std": STD, "dims": ("width", None), "rngs": rngs}
        self.pooler = Linear(width, width, **pooler) if config.pooler else None

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        visible: Bool[Array, "b t"] | None = None,
        types: Int[Array, "b t"] | None = None,
        keys: Keys = None,
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
        time, config = tokens.shape[1], self.config
        if time > config.context:
            raise DataError(
                f"a text of {time} tokens is longer than the model's context of {config.context}. "
                f"Cut the texts."
            )
        keys = drawn_from(keys, config.dropout, train=not self.deterministic)
        # Padding is a segment of its own, which no text sees.
        segments = None if visible is None else visible.astype(jnp.int32)
        kinds = self.types[:1][None] if types is None else look_up(self.types[...], types)
        x = add_positions(look_up(self.tokens[...], tokens), self.positions[:time]) + kinds
        x = drop(self.norm(x), config.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        for block in self.blocks:
            x = block(x, keys, segments)
        return x

    def pooled(
        self,
        tokens: Int[Array, "b t"],
        visible: Bool[Array, "b t"] | None = None,
        types: Int[Array, "b t"] | None = None,
        keys: Keys = None,
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
    """Attention, then an MLP, each added to its input.

    A ViT normalises the input of each part, and a text encoder the sum.
    """

    def __init__(self, config: ViT | Encoder, index: int, placement: Placement, rngs: nnx.Rngs):
        self.config, self.index, self.placement = config, index, placement
        self.norms_first = isinstance(config, ViT)
        width, hidden = config.width, config.size_of_hidden
        linear = functools.partial(Linear, std=STD, rngs=rngs)
        self.norm_attention = _norm(config)
        self.qkv = linear(width, 3 * width, dims=("width", "heads"))
        self.out = linear(width, width, dims=("heads", "width"))
        self.norm_mlp = _norm(config)
        self.up = linear(width, hidden, dims=("width", "hidden"))
        self.down = linear(hidden, width, dims=("hidden", "width"))

    def __call__(
        self, x: Float[Array, "b t d"], keys: Keys, segments: Segments = None
    ) -> Float[Array, "b t d"]:
        """Return `x` with both parts added; a row drops by its own key."""
        attend = functools.partial(self.attention, segments=segments)
        for part, norm, site in ((attend, self.norm_attention, 1), (self.mlp, self.norm_mlp, 2)):
            y = part(norm(x) if self.norms_first else x)
            x = x + drop(y, self.config.dropout, keys, site=2 * self.index + site)
            x = x if self.norms_first else norm(x)
            x = self.placement.constrain(x, "batch", "time", "width")
        return x

    def attention(self, x: Float[Array, "b t d"], segments: Segments) -> Float[Array, "b t d"]:
        """Return the attention of each position to all of its segment."""
        # Columns are heads, then query, key and value: a slice of the columns is complete heads.
        qkv = self.qkv(x).reshape(*x.shape[:2], self.config.heads, 3, -1)  # b t h 3 k
        qkv = self.placement.constrain(qkv, "batch", "time", "heads", None, None)
        # The transpose of a split is one concatenation; of indexing, sums of padded arrays.
        q, k, v = (
            self.placement.constrain(part.squeeze(3), "batch", "time", "heads", "head_size")
            for part in jnp.split(qkv, 3, axis=3)
        )
        return self.out(self.placement.attend(FullAttention(), q, k, v, segments).reshape(x.shape))

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the MLP."""
        wide = self.placement.constrain(self.up(x), "batch", "time", "hidden")
        return self.down(activate(self.config.activation, wide, None))


def _norm(config: ViT | Encoder) -> Norm:
    return Norm(config.width, kind="layer", epsilon=config.epsilon, bias=True)
