"""Blocks of a transformer, of a decoder and of an encoder."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.attention.rotary import RotaryAngles, rotate
from jtrain.models.classifiers import ViT
from jtrain.models.encoder import Encoder
from jtrain.models.experts import NoExperts
from jtrain.models.layers.dropout import KeySequence, drop
from jtrain.models.layers.feed_forward import GATED, MixtureOfExperts, activate
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import layer_norm, rms_norm
from jtrain.models.transformer import Transformer
from jtrain.parallel.explicit import reshard_like

Keys: TypeAlias = Shaped[Array, "b"] | None
Segments: TypeAlias = Int[Array, "b t"] | None
STD = 0.02  # of every kernel and embedding, as in GPT-2 and BERT
# (q, k, v) -> b t h k, and the cache for later tokens or None.
Attend: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Any]]


class BlockOutput(NamedTuple):
    """The output of a block, its cache and its router's logits."""

    x: Array  # b t d
    cache: Any  # as `attend` returns it
    router_logits: Array | None  # b t e; None without experts


class Norm(nnx.Module):
    """LayerNorm with its scale and bias, or RMSNorm with its scale.

    If it is `zero_centered`, it multiplies by 1 + scale, in at least float32.

    Args:
        width: the dim that is normalised; 0: that between blocks.
    """

    def __init__(self, config: Transformer | ViT | Encoder, width: int = 0):
        width = width or config.width
        self.kind, self.epsilon, self.zero_centered = (
            config.norm,
            config.epsilon,
            config.zero_centered,
        )
        # The dim has no mesh axis; its name is there so that a stack of layers can be recognised.
        no_name: Any = {"dims": (None,)}
        scale = jnp.zeros(width) if self.zero_centered else jnp.ones(width)
        self.scale = nnx.Param(scale, **no_name)
        biased = config.bias and self.kind == "layer"
        self.bias = nnx.Param(jnp.zeros(width), **no_name) if biased else None

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalise `x` over its last dim."""
        scale, bias = self.scale[...], None if self.bias is None else self.bias[...]
        if self.zero_centered:  # 1 + a small bfloat16 would round the scale away
            scale, bias = 1 + at_least_f32(scale), None if bias is None else at_least_f32(bias)
        wide = at_least_f32(x) if self.zero_centered else x
        if self.kind == "rms":
            return rms_norm(wide, scale, epsilon=self.epsilon).astype(x.dtype)
        return layer_norm(wide, scale, bias, epsilon=self.epsilon).astype(x.dtype)


class TransformerBlock(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to its input.

    With `post_norm` the output of each is normalised before it is added. A text encoder normalises
    the sums, and not the inputs.
    """

    def __init__(
        self,
        config: Transformer | ViT | Encoder,
        placement: Placement,
        rngs: nnx.Rngs | KeySequence,
    ):
        self.config, self.placement = config, placement
        self.norms_first = not isinstance(config, Encoder)
        width, hidden, head_size = config.width, config.size_of_hidden, config.size_of_head
        decoder = isinstance(config, Transformer)  # the sum over 2 x layers keeps its size
        std_out = STD / math.sqrt(2 * config.layers) if decoder else STD
        linear = functools.partial(
            Linear, bias=config.bias, std=STD, flat=placement.times == 1, rngs=rngs
        )
        self.norm_attention = Norm(config)
        columns = (config.heads + 2 * config.groups) * head_size
        biased = config.bias or config.qkv_bias
        shards = "kv_heads" if decoder else "heads"
        self.qkv = linear(width, columns, dims=("width", shards), bias=biased)
        self.norm_q = Norm(config, head_size) if config.qk_norm else None
        self.norm_k = Norm(config, head_size) if config.qk_norm else None
        inner = config.heads * head_size
        self.out = linear(inner, width, dims=("heads", "width"), std=std_out)
        self.norm_mlp = Norm(config)
        self.norm_attention_out = Norm(config) if config.post_norm else None
        self.norm_mlp_out = Norm(config) if config.post_norm else None
        self.mixture = (
            MixtureOfExperts(config, config.experts, placement, rngs, (STD, std_out))
            if isinstance(config, Transformer) and not isinstance(config.experts, NoExperts)
            else None
        )
        if self.mixture is not None:
            return
        gated = config.activation in GATED
        self.gate = linear(width, hidden, dims=("width", "hidden")) if gated else None
        self.up = linear(width, hidden, dims=("width", "hidden"))
        self.down = linear(hidden, width, dims=("hidden", "width"), std=std_out)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        keys: Keys,
        index: int | Int[Array, ""],
        angles: RotaryAngles | None,
        attend: Attend,
        *,
        complete_rows: bool = True,
        order: np.ndarray | None = None,
        bias: Float[Array, "e"] | None = None,
    ) -> BlockOutput:
        """Return `x` with both parts added; a row drops by its own key.

        Args:
            index: the number of the layer, from 0.
            complete_rows: False for tokens that continue cached ones.
            order: the position of each token of `x`, where they are permuted.
            bias: of each expert, where there are biases.
        """
        drop_rows = functools.partial(drop, rate=self.config.dropout, keys=keys, order=order)
        site = 2 * index + 1
        before = lambda norm, x: norm(x) if self.norms_first else x
        after = lambda norm, x: x if self.norms_first else norm(x)
        y, cache = self.attention(before(self.norm_attention, x), angles, attend)
        y = y if self.norm_attention_out is None else self.norm_attention_out(y)
        x = after(self.norm_attention, x + drop_rows(reshard_like(y, x), site=site))
        x = self.placement.constrain(x, "batch", "time", "width")
        x_mlp, router_logits = before(self.norm_mlp, x), None
        if self.mixture is None:
            y = self.mlp(x_mlp)
        else:
            options = {"complete_rows": complete_rows, "order": order, "bias": bias}
            y, router_logits = self.mixture(x_mlp, **options)
        y = y if self.norm_mlp_out is None else self.norm_mlp_out(y)
        x = after(self.norm_mlp, x + drop_rows(reshard_like(y, x), site=site + 1))
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
