"""Attention of a decoder and of an encoder, with soft caps, windows, segments and a cache.

`FullAttention`, and `Causal` of `jtrain.models.attention.blockwise`, are what a network hands to
its placement.
"""

import math
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.errors import ConfigError
from jtrain.models.presets import nearest_divisor

Queries: TypeAlias = Float[Array, "b t h k"]
KV: TypeAlias = Float[Array, "b s g k"]  # keys or values, those of a group of heads
Segments: TypeAlias = Int[Array, "b s"] | None
Implementation: TypeAlias = Literal["xla", "cudnn", "splash", "tokamax"]


def attention(
    q: Queries,
    k: KV,
    v: KV,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    segments: Segments = None,
    implementation: str | None = "xla",
    platform: str | None = None,
) -> Float[Array, "b t h k"]:
    """Return softmax(q k / sqrt(head size)) v over the positions up to each query's own.

    The queries are the last `t` of the `s` positions. Head `i` reads the keys and values of group
    `i // (h / g)`. The softmax is taken in at least float32.

    Args:
        k: keys, one for each group of heads.
        v: values, one for each group of heads.
        window: positions that a query sees, its own included; None: all before it.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None: no cap.
        scale: factor of the products; None: 1 / sqrt(k).
        segments: a number for each position, which sees only positions of the same number.
        implementation: `xla` (or None) writes the scores out and runs anywhere; `cudnn` needs an
            NVIDIA GPU, `splash` a TPU, `tokamax` its package. None is chosen by itself.
        platform: platform of the compiled program, if it is not that of this machine.

    Raises:
        ConfigError: if the heads are not a multiple of the groups, a number is out of its range, or
            the implementation does not support the arguments or the platform.

    Sources: Vaswani et al. 2017, arXiv 1706.03762; groups: Ainslie et al. 2023, arXiv 2305.13245;
    windows: Beltagy et al. 2020, arXiv 2004.05150; soft caps: Gemma 2, 2024, arXiv 2408.00118.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    _check(q, k, window, soft_cap)
    if implementation in ("cudnn", "splash", "tokamax"):
        from jtrain.models.attention import kernels

        kernel = getattr(kernels, implementation)
        options = {"window": window, "soft_cap": soft_cap, "scale": scale, "segments": segments}
        return kernel(q, k, v, platform=platform, **options)
    if implementation not in (None, "xla"):
        raise ConfigError(
            f"there is no implementation {implementation!r} of attention. "
            f"Implementations: {', '.join(get_args(Implementation))}."
        )
    mask = visible(q.shape[1], k.shape[1], window)  # t s
    if segments is not None:
        mask = mask[None] & same_segment(segments, q.shape[1])
    return attention_where(q, k, v, mask, scale=scale, soft_cap=soft_cap)


def attention_where(
    q: Queries,
    k: KV,
    v: KV,
    mask: Bool[Array, "*b t s"],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "b t h k"]:
    """Return softmax(scale x q k) v where `mask` is true; each query needs one position or more.

    Heads are a leading dim inside, so that they are a batch of plain matrix products.
    """
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))  # b h t k, b g s k
    shape, groups = q.shape, k.shape[1]
    if groups != shape[1]:  # the heads of a group are more rows of one product
        q = q.reshape(shape[0], groups, -1, shape[-1])
    scores = at_least_f32(jnp.einsum("bhtk,bhsk->bhts", q, k)) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # Added, not selected: for a select XLA:CPU writes a constant array of the size of the scores.
    hidden = jnp.where(mask, 0, -1e30).astype(scores.dtype)
    hidden = hidden[None, None] if mask.ndim == 2 else hidden[:, None]
    if groups != shape[1]:
        hidden = jnp.tile(hidden, (1, 1, shape[1] // groups, 1))
    chances = jax.nn.softmax(scores + hidden, axis=-1).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bhts,bhsk->bhtk", chances, v).reshape(shape), 1, 2)


def visible(t: int, s: int, window: int | None = None) -> Bool[Array, "t s"]:
    """Return which of the `s` positions each of the last `t` sees."""
    before = jnp.tri(t, s, s - t, dtype=bool)
    return before if window is None else before & ~jnp.tri(t, s, s - t - window, dtype=bool)


def same_segment(segments: Int[Array, "b s"], t: int) -> Bool[Array, "b t s"]:
    """Return which positions are in the segment of each of the last `t`."""
    return segments[:, -t:, None] == segments[:, None]


def _check(q, k, window, soft_cap):
    (_, t, heads, _), (_, s, groups, _) = q.shape, k.shape
    if heads % groups:
        raise ConfigError(
            f"{heads} heads cannot share {groups} groups of keys and values evenly. "
            f"Nearest: {nearest_divisor(heads, groups)} groups."
        )
    if t > s:
        raise ConfigError(
            f"{t} queries cannot be the last of {s} positions. Give as many keys as queries."
        )
    if window is not None and window < 1:
        raise ConfigError(
            f"a window of {window} positions sees nothing. The least is window=1, the "
            f"position itself; window=None sees all before it."
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(
            f"a soft cap of {soft_cap} bounds the scores to nothing. Give a positive number "
            f"(Gemma 2 has 50), or soft_cap=None for no bound."
        )


def soft_cap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return cap x tanh(x / cap), in at least float32; `x` itself without a cap.

    Source: Gemma team 2024, https://arxiv.org/abs/2408.00118.
    """
    if cap is None:
        return x
    return (cap * jnp.tanh(at_least_f32(x) / cap)).astype(x.dtype)


def places_within(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return each position's index in its segment, from 0; a segment is a run of one number."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    starts = jnp.where(segments != before, index, 0)
    return index - jax.lax.cummax(starts, axis=1)


class FullAttention:
    """Attention of each position to all."""

    kernel = False

    def __call__(
        self, q: Queries, k: KV, v: KV, segments: Segments = None, *, platform: str | None = None
    ) -> Float[Array, "b t h k"]:
        """Return softmax(q k / sqrt(head size)) v over all positions of the same segment."""
        del platform
        visible = jnp.ones((q.shape[1], k.shape[1]), bool)
        if segments is not None:
            visible = same_segment(segments, q.shape[1])
        return attention_where(q, k, v, visible, scale=1 / math.sqrt(q.shape[-1]))
