"""Networks whose positions see one another: a vision transformer and a text encoder."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.errors import ConfigError, DataError
from jtrain.models.attention import FullAttention
from jtrain.models.classifiers import ViT
from jtrain.models.encoder import Encoder
from jtrain.models.images import as_images
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.linear import Linear, add_positions, look_up
from jtrain.models.networks.block import STD, Keys, Norm, Segments, TransformerBlock
from jtrain.parallel.explicit import gathered, keeps_split


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
            TransformerBlock(config, placement, rngs) for _ in range(config.layers)
        )
        self.norm = Norm(config)
        self.head = Linear(width, config.classes, std=STD, dims=("width", "classes"), rngs=rngs)

    def __call__(
        self, x: Num[Array, "b *s"], keys: Keys = None, mask: Bool[Array, "b"] | None = None
    ) -> Float[Array, "b c"]:
        """Return the logits of each row; raise DataError if the images have another shape."""
        config = self.config
        keys = drawn_from(keys, config.dropout, train=not self.deterministic)
        x = as_images(x, config.image, self.positions[...].dtype, mask, config.pixels)
        x = self.patches(cut(x, config.patch))  # b t d
        if self.token is not None:
            x = keeps_split(after_token)(x, self.token[...])
        x = drop(add_positions(x, gathered(self.positions[...])), config.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        x = _through(self.blocks, x, keys)
        # Where the head reads the class token alone, no other position needs the last norm.
        x = self.norm(x if self.token is None else x[:, :1])
        x = self.placement.constrain(at_least_f32(x).mean(1).astype(x.dtype), "batch", "width")
        return self.placement.constrain(self.head(x), "batch", "classes")


def after_token(x: Float[Array, "b t d"], token: Float[Array, "d"]) -> Float[Array, "b s d"]:
    """Return `x` with the token's vector before the first position of each row."""
    first = jnp.broadcast_to(token[None, None], (len(x), 1, x.shape[-1]))
    return jnp.concatenate([first, x], 1)


@keeps_split
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
        self.norm = Norm(config)
        self.blocks = nnx.List(
            TransformerBlock(config, placement, rngs) for _ in range(config.layers)
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
        """Return the vector of each position; raise DataError if a text is too long.

        Args:
            visible: which positions are text and not padding; None: all.
            types: the part of the text, 0 or 1, that a token belongs to; None: all 0.
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
        table, positions = gathered(self.types[...]), gathered(self.positions[...])
        kinds = table[:1][None] if types is None else look_up(table, types)
        x = add_positions(look_up(self.tokens[...], tokens), positions[:time]) + kinds
        x = drop(self.norm(x), config.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        return _through(self.blocks, x, keys, segments)

    def pooled(
        self,
        tokens: Int[Array, "b t"],
        visible: Bool[Array, "b t"] | None = None,
        types: Int[Array, "b t"] | None = None,
        keys: Keys = None,
    ) -> Float[Array, "b d"]:
        """Return tanh of a linear map of the first vector; raise ConfigError without a pooler."""
        if self.pooler is None:
            raise ConfigError(
                'method="pooled" is of a model that has a pooler. Set model.pooler=true, or '
                "take the mean of the vectors: jtrain.models.mean_pool."
            )
        return jnp.tanh(self.pooler(self(tokens, visible, types, keys)[:, 0]))


def _through(
    blocks: Sequence[TransformerBlock],
    x: Float[Array, "b t d"],
    keys: Keys,
    segments: Segments = None,
) -> Float[Array, "b t d"]:
    """Return `x` after every block; each position sees all of its segment."""
    for index, block in enumerate(blocks):
        full = functools.partial(block.placement.attend, FullAttention())
        attend = lambda q, k, v, full=full: (full(q, k, v, segments), None)
        x = block(x, keys, index, None, attend).x
    return x
