"""The network of a vision transformer."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.attention.full import FullAttention
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.embedding import add_positions
from jtrain.models.layers.feed_forward import bend
from jtrain.models.layers.image_classes import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm
from jtrain.models.pixels import Pixels

STD = 0.02  # of every kernel and embedding


class ViTModule(nnx.Module):
    """Images to logits; the arguments are the fields of `jtrain.models.vit.ViT`.

    Args:
        positions: patches of an image, plus 1 for a class token.
    """

    def __init__(
        self,
        *,
        image: tuple[int, int, int],
        pixels: Pixels,
        patch: int,
        layers: int,
        heads: int,
        width: int,
        hidden: int,
        epsilon: float,
        pool: Literal["class", "mean"],
        classes: int,
        dropout: float,
        positions: int,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.image, self.pixels, self.patch = image, pixels, patch
        self.dropout, self.placement = dropout, placement
        self.deterministic = True

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(STD * jax.random.normal(rngs.params(), shape))

        numbers = patch**2 * pixels.shape(image)[2]
        self.patches = Linear(numbers, width, std=STD, dims=(None, "width"), rngs=rngs)
        self.token = normal(width) if pool == "class" else None
        self.positions = normal(positions, width)
        self.blocks = nnx.List(
            EncoderBlock(
                index,
                width=width,
                heads=heads,
                hidden=hidden,
                epsilon=epsilon,
                dropout=dropout,
                placement=placement,
                rngs=rngs,
            )
            for index in range(layers)
        )
        self.norm = _norm(width, epsilon)
        self.head = Linear(width, classes, std=STD, dims=("width", "classes"), rngs=rngs)

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b c"]:
        """Return the logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if the network trains with dropout and `keys` is None.
        """
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        x = as_images(x, self.image, self.positions[...].dtype, mask, self.pixels)
        x = self.patches(cut(x, self.patch))  # b t d
        if self.token is not None:
            first = jnp.broadcast_to(self.token[...][None, None], (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([first, x], 1)
        x = drop(add_positions(x, self.positions[...]), self.dropout, keys)
        x = self.placement.constrain(x, "batch", "time", "width")
        for block in self.blocks:
            x = block(x, keys)
        # Where the head reads the class token alone, no other position needs the last norm.
        x = self.norm(x if self.token is None else x[:, :1])
        x = self.placement.constrain(at_least_f32(x).mean(1).astype(x.dtype), "batch", "width")
        return self.placement.constrain(self.head(x), "batch", "classes")


class EncoderBlock(nnx.Module):
    """Attention, then an MLP, each added to its input."""

    def __init__(
        self,
        index: int,
        *,
        width: int,
        heads: int,
        hidden: int,
        epsilon: float,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.index, self.heads, self.dropout, self.placement = index, heads, dropout, placement
        self.norm_attention = _norm(width, epsilon)
        linear = functools.partial(Linear, std=STD, rngs=rngs)
        self.qkv = linear(width, 3 * width, dims=("width", "heads"))
        self.out = linear(width, width, dims=("heads", "width"))
        self.norm_mlp = _norm(width, epsilon)
        self.up = linear(width, hidden, dims=("width", "hidden"))
        self.down = linear(hidden, width, dims=("hidden", "width"))

    def __call__(
        self, x: Float[Array, "b t d"], keys: Shaped[Array, "b"] | None
    ) -> Float[Array, "b t d"]:
        """Return `x` with both parts added; a row drops by its own key."""
        site = 2 * self.index + 1
        x = x + drop(self.attention(self.norm_attention(x)), self.dropout, keys, site=site)
        x = self.placement.constrain(x, "batch", "time", "width")
        x = x + drop(self.mlp(self.norm_mlp(x)), self.dropout, keys, site=site + 1)
        return self.placement.constrain(x, "batch", "time", "width")

    def attention(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return the attention of each position to all."""
        # Columns are heads, then query, key and value: a slice of the columns is complete heads.
        qkv = self.qkv(x).reshape(*x.shape[:2], self.heads, 3, -1)  # b t h 3 k
        qkv = self.placement.constrain(qkv, "batch", "time", "heads", None, None)
        # The transpose of a split is one concatenation; of indexing, sums of padded arrays.
        q, k, v = (
            self.placement.constrain(part.squeeze(3), "batch", "time", "heads", "head_size")
            for part in jnp.split(qkv, 3, axis=3)
        )
        return self.out(self.placement.attend(FullAttention(), q, k, v).reshape(x.shape))

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the MLP: a wide layer with an exact GELU."""
        wide = self.placement.constrain(self.up(x), "batch", "time", "hidden")
        return self.down(bend("gelu_exact", wide, None))


def cut(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b t p"]:
    """Return the patches of each image, row by row; p runs over rows, columns, channels.

    A linear map of the patches is the convolution with a kernel and a stride of `patch`.
    """
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c).swapaxes(2, 3)
    return x.reshape(b, -1, patch * patch * c)


def _norm(width: int, epsilon: float) -> Norm:
    return Norm(width, kind="layer", epsilon=epsilon, bias=True)
