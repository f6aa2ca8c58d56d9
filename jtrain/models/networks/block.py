"""One block of a transformer."""

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
from jtrain.models.attention.rotary import RotaryAngles, rotate
from jtrain.models.experts.mixture import MixtureOfExperts
from jtrain.models.layers.dropout import drop
from jtrain.models.layers.feed_forward import bend
from jtrain.models.layers.key_sequence import KeySequence
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import Norm
from jtrain.models.transformer import Transformer

STD = 0.02  # of every kernel and embedding, as in GPT-2
# (q, k, v) -> what they give, b t h k, and what is kept of them for tokens to come, or None.
Attend: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Any]]


class BlockOutput(NamedTuple):
    """What a block gives."""

    x: Array  # b t d
    kept: Any  # what `attend` keeps
    routed: Array | None  # b t e, the logits of its router; None where it has no experts


class TransformerBlock(nnx.Module):
    """Attention, then an MLP or a mixture of them, each added to what came in."""

    def __init__(self, values: Transformer, place: Placement, rngs: KeySequence):
        self.values, self.place = values, place
        width, heads, size = values.width, values.heads, values.size_of_head
        onto = STD / math.sqrt(2 * values.layers)  # the sum over 2 x layers keeps its size
        linear = lambda inputs, outputs, *dims, std=STD: Linear(
            inputs,
            outputs,
            bias=values.bias,
            std=std,
            dims=dims,
            flat=place.times == 1,
            rngs=rngs,
        )
        norm = lambda width: Norm(width, kind=values.norm, epsilon=values.epsilon, bias=values.bias)
        self.norm_attention = norm(width)
        self.qkv = linear(width, (heads + 2 * values.groups) * size, "width", "kv_heads")
        self.norm_q = norm(size) if values.qk_norm else None
        self.norm_k = norm(size) if values.qk_norm else None
        self.out = linear(heads * size, width, "heads", "width", std=onto)
        self.norm_mlp = norm(width)
        mixture = values.experts.kind != "none"
        self.mixture = (
            MixtureOfExperts(values, place, rngs, std=STD, onto=onto) if mixture else None
        )
        if mixture:
            return
        gated = values.activation == "swiglu"
        up = lambda: linear(width, values.size_of_hidden, "width", "hidden")
        self.gate = up() if gated else None
        self.up = up()
        self.down = linear(values.size_of_hidden, width, "hidden", "width", std=onto)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        keys: Shaped[Array, "b"] | None,
        index: int | Int[Array, ""],
        turn: RotaryAngles | None,
        attend: Attend,
        *,
        whole: bool = True,
        order: np.ndarray | None = None,
    ) -> BlockOutput:
        """`x` with both parts added; a row drops by its own key.

        `whole`: whether these are whole rows, or what comes after tokens that are remembered.
        `order`: which positions they are, where they are not in their own order.
        """
        drops = functools.partial(drop, rate=self.values.dropout, keys=keys, order=order)
        site = 2 * index + 1
        mixed, kept = self.attention(self.norm_attention(x), turn, attend)
        x = x + drops(mixed, site=site)
        x = self.place.constrain(x, "batch", "time", "width")
        x_mlp, routed = self.norm_mlp(x), None
        if self.mixture is None:
            fed = self.mlp(x_mlp)
        else:
            fed, routed = self.mixture(x_mlp, whole=whole, order=order)
        x = x + drops(fed, site=site + 1)
        return BlockOutput(self.place.constrain(x, "batch", "time", "width"), kept, routed)

    def attention(
        self, x: Float[Array, "b t d"], turn: RotaryAngles | None, attend: Attend
    ) -> tuple[Float[Array, "b t d"], Any]:
        """What each position takes from those up to its own."""
        heads, groups = self.values.heads, self.values.groups
        each = heads // groups  # query heads that share a key and a value
        # Columns are groups, then queries, key and value: a slice of the columns is whole groups.
        together = checkpoint_name(self.qkv(x), "qkv")
        together = together.reshape(*x.shape[:2], groups, each + 2, -1)  # b t g each+2 k
        together = self.place.constrain(together, "batch", "time", "kv_heads", None, None)
        # A split, whose transpose is one concatenation; indexing's would be sums of padded parts.
        q, k, v = jnp.split(together, (each, each + 1), axis=3)
        q = self._ready(q.reshape(*q.shape[:2], heads, -1), self.norm_q, turn)
        k = self._ready(k.squeeze(3), self.norm_k, turn)
        v = self._ready(v.squeeze(3), None, None)
        mixed, kept = attend(q, k, v)
        mixed = checkpoint_name(mixed.reshape(*x.shape[:2], -1), "attention")
        return self.out(mixed), kept

    def _ready(
        self, x: Float[Array, "b t h k"], norm: Norm | None, turn: RotaryAngles | None
    ) -> Float[Array, "b t h k"]:
        x = x if norm is None else norm(x)
        x = x if turn is None else rotate(x, turn)
        heads = "heads" if x.shape[2] == self.values.heads else "kv_heads"
        return self.place.constrain(x, "batch", "time", heads, "head_size")

    def mlp(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """A wide layer with a bend, and back."""
        wide = lambda layer: checkpoint_name(
            self.place.constrain(layer(x), "batch", "time", "hidden"), "hidden"
        )
        gate = None if self.gate is None else wide(self.gate)
        return self.down(bend(self.values.activation, wide(self.up), gate))
