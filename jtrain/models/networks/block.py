"""One block of a transformer."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.placement import Placement
from jtrain.models.attention.rotary import RotaryAngles, rotate
from jtrain.models.experts.experts import Experts, NoExperts
from jtrain.models.experts.mixture import MixtureOfExperts
from jtrain.models.layers.dropout import KeySequence, drop
from jtrain.models.layers.feed_forward import GATED, Activation, bend
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm

STD = 0.02  # of every kernel and embedding, as in GPT-2
# (q, k, v) -> b t h k, and the cache for later tokens or None.
Attend: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Any]]


class BlockOutput(NamedTuple):
    """The output of a block, its cache and its router's logits."""

    x: Array  # b t d
    cache: Any  # as `attend` returns it
    router_logits: Array | None  # b t e; None without experts


class TransformerBlock(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to its input.

    With `post_norm` the output of each is normalised before it is added.

    The arguments are the fields of `jtrain.models.transformer.Transformer`, with `kv_heads`,
    `head_size` and `hidden` greater than 0.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        hidden: int,
        norm: Literal["layer", "rms"],
        epsilon: float,
        activation: Activation,
        experts: Experts,
        dropout: float,
        bias: bool,
        qkv_bias: bool,
        qk_norm: bool,
        post_norm: bool,
        zero_centered: bool,
        placement: Placement,
        rngs: KeySequence,
    ):
        self.heads, self.kv_heads = heads, kv_heads
        self.activation: Activation = activation
        self.dropout, self.placement = dropout, placement
        std_out = STD / math.sqrt(2 * layers)  # the sum over 2 x layers keeps its size

        def linear(
            inputs: int, outputs: int, *dims: str, std: float = STD, bias: bool = bias
        ) -> Linear:
            flat = placement.times == 1
            return Linear(
                inputs, outputs, bias=bias, std=std, dims=(dims[0], dims[1]), flat=flat, rngs=rngs
            )

        make_norm = functools.partial(
            Norm, kind=norm, epsilon=epsilon, bias=bias, zero_centered=zero_centered
        )
        self.norm_attention = make_norm(width)
        columns = (heads + 2 * kv_heads) * head_size
        self.qkv = linear(width, columns, "width", "kv_heads", bias=bias or qkv_bias)
        self.norm_q = make_norm(head_size) if qk_norm else None
        self.norm_k = make_norm(head_size) if qk_norm else None
        self.out = linear(heads * head_size, width, "heads", "width", std=std_out)
        self.norm_mlp = make_norm(width)
        self.norm_attention_out = make_norm(width) if post_norm else None
        self.norm_mlp_out = make_norm(width) if post_norm else None
        self.mixture = (
            None
            if isinstance(experts, NoExperts)
            else MixtureOfExperts(
                experts=experts,
                width=width,
                hidden=hidden,
                activation=activation,
                std=STD,
                std_out=std_out,
                placement=placement,
                rngs=rngs,
            )
        )
        if self.mixture is not None:
            return
        self.gate = linear(width, hidden, "width", "hidden") if activation in GATED else None
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
        drop_rows = functools.partial(drop, rate=self.dropout, keys=keys, order=order)
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
        heads, kv_heads = self.heads, self.kv_heads
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
        heads = "heads" if x.shape[2] == self.heads else "kv_heads"
        return self.placement.constrain(x, "batch", "time", heads, "head_size")

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the MLP: a wide layer with its activation."""

        def wide(layer: Linear) -> Array:
            y = self.placement.constrain(layer(x), "batch", "time", "hidden")
            return checkpoint_name(y, "hidden")

        gate = None if self.gate is None else wide(self.gate)
        return self.down(bend(self.activation, wide(self.up), gate))
