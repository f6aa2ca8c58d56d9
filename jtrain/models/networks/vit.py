"""The network of a vision transformer."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.attention.attention import attention_where
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.feed_forward import bend
from jtrain.models.layers.images import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm
from jtrain.models.vit import ViT

STD = 0.02  # of every kernel and embedding
EPSILON = 1e-6  # of every norm, as published


class ViTModule(nnx.Module):
    """Images to logits."""

    def __init__(self, values: ViT, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        width = values.width
        normal = lambda *shape: nnx.Param(STD * jax.random.normal(rngs.params(), shape))
        self.patches = Linear(
            values.patch**2 * values.image[2], width, std=STD, dims=(None, "width"), rngs=rngs
        )
        self.token = normal(width) if values.pool == "class" else None
        self.positions = normal(values.positions, width)
        self.blocks = nnx.List(EncoderBlock(values, place, i, rngs) for i in range(values.layers))
        self.norm = norm_of(width)
        self.head = Linear(width, values.classes, std=STD, dims=("width", "classes"), rngs=rngs)

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b c"]:
        """Logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if it shall drop and got no keys.
        """
        rate = self.values.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
        x = as_images(x, self.values.image, self.positions[...].dtype, mask)
        x = self.patches(cut(x, self.values.patch))  # b t d
        if self.token is not None:
            first = jnp.broadcast_to(self.token[...][None, None], (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([first, x], 1)
        x = drop(x + self.positions[...][None], rate, keys)
        x = self.place.constrain(x, "batch", "time", "width")
        for block in self.blocks:
            x = block(x, keys)
        # Where the class token is all that is read, nothing else needs the last norm.
        x = self.norm(x[:, :1] if self.values.pool == "class" else x)
        x = self.place.constrain(at_least_f32(x).mean(1).astype(x.dtype), "batch", "width")
        return self.place.constrain(self.head(x), "batch", "classes")


class EncoderBlock(nnx.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self, values: ViT, place: Placement, index: int, rngs: nnx.Rngs):
        self.values, self.place, self.index = values, place, index
        width = values.width
        self.norm_attention = norm_of(width)
        linear = functools.partial(Linear, std=STD, rngs=rngs)
        self.qkv = linear(width, 3 * width, dims=("width", "heads"))
        self.out = linear(width, width, dims=("heads", "width"))
        self.norm_mlp = norm_of(width)
        self.up = linear(width, 4 * width, dims=("width", "hidden"))
        self.down = linear(4 * width, width, dims=("hidden", "width"))

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
        """What each position takes from all."""
        # Columns are heads, then query, key and value: a slice of the columns is whole heads.
        together = self.qkv(x).reshape(*x.shape[:2], self.values.heads, 3, -1)  # b t h 3 k
        together = self.place.constrain(together, "batch", "time", "heads", None, None)
        # A split, whose transpose is one concatenation; indexing's would be sums of padded parts.
        q, k, v = (
            self.place.constrain(part.squeeze(3), "batch", "time", "heads", "head_size")
            for part in jnp.split(together, 3, axis=3)
        )
        return self.out(self.place.attend(FullAttention(), q, k, v).reshape(x.shape))

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """A wide layer with an exact GELU, and back."""
        wide = self.place.constrain(self.up(x), "batch", "time", "hidden")
        return self.down(bend("gelu_exact", wide, None))


class FullAttention:
    """Attention of each position to all."""

    kernel = False

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s h k"],
        v: Float[Array, "b s h k"],
        segments: Int[Array, "b s"] | None = None,
        *,
        platform: str | None = None,
    ) -> Float[Array, "b t h k"]:
        """softmax(q k / sqrt(head size)) v over all positions; there are no segments."""
        assert segments is None, "an image is one sequence"
        del platform
        seen = jnp.ones((q.shape[1], k.shape[1]), bool)
        return attention_where(q, k, v, seen, scale=1 / math.sqrt(q.shape[-1]))


def cut(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b t p"]:
    """The patches of each image, row by row; the numbers of one by rows, columns, channels.

    A linear map of them is the convolution with a kernel and a stride of `patch`.
    """
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c).swapaxes(2, 3)
    return x.reshape(b, -1, patch * patch * c)


def norm_of(width: int) -> Norm:
    """LayerNorm as a ViT has it."""
    return Norm(width, kind="layer", epsilon=EPSILON, bias=True)
