"""Causal attention, also of some queries to some keys, to be combined with that to other keys.

Scores exist for at most `BLOCK` queries at a time, in at least float32.
Sources: the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867; its gradient as in
FlashAttention, Dao et al. 2022, arXiv 2205.14135.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.models.attention import KV, Queries, Segments, attention, attention_where
from jtrain.parallel.attention.protocol import BlockPositions

BLOCK = 512
HIDDEN = -1e30  # added to the score of a hidden key


@dataclasses.dataclass(frozen=True)
class Causal:
    """Attention of each position to itself and those before; see `attention`."""

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    implementation: str | None = "xla"

    @property
    def kernel(self) -> bool:
        """Use of a kernel, which the compiler cannot split over devices."""
        return self.implementation not in (None, "xla")

    def __call__(
        self, q: Queries, k: KV, v: KV, segments: Segments = None, *, platform: str | None = None
    ) -> Float[Array, "b t h k"]:
        """Return `attention(q, k, v)` with these values; raise as `attention` does."""
        return attention(q, k, v, segments=segments, platform=platform, **dataclasses.asdict(self))

    def part(
        self, q: Queries, k: KV, v: KV, positions: BlockPositions
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
        """Return the weighted mean of the values and the log of the sum of the weights.

        Both are at least float32. For a query that sees none of the keys the mean is finite and the
        log about `HIDDEN`.
        """

        def block_step(_, block):
            q, at = block
            scores, _ = _scores(self, q, k, at)
            top = scores.max(-1, keepdims=True)
            powers = jnp.exp(scores - top)
            total = powers.sum(-1, keepdims=True)  # b g e t 1
            mean = _product("bgets,bsgk->btgek", powers.astype(v.dtype), v)
            return None, (
                mean / jnp.moveaxis(total, 3, 1),
                jnp.moveaxis((top + jnp.log(total))[..., 0], 3, 1),
            )

        _, (mean, log_sum) = _scan_blocks(block_step, None, _blocks(_grouped(q, k), positions))
        return _join_blocks(mean).reshape(q.shape), _join_blocks(log_sum).reshape(q.shape[:3])

    def part_gradient(
        self,
        q: Queries,
        k: KV,
        v: KV,
        positions: BlockPositions,
        log_sum: Float[Array, "b t h"],
        dot: Float[Array, "b t h"],
        cotangent: Float[Array, "b t h k"],
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """Return what these keys add to the gradients in q, k and v, at least float32.

        Args:
            log_sum: log of the sum of the weights of all keys, these and others.
            dot: `cotangent` x the output over all keys, summed over each head.
            cotangent: gradient of the output over all keys.
        """

        def block_step(sums, block):
            (q, cotangent, log_sum, dot), at = block
            scores, slope = _scores(self, q, k, at)
            chances = jnp.exp(scores - _by_score(log_sum))
            slopes = chances * (_product("btgek,bsgk->bgets", cotangent, v) - _by_score(dot))
            slopes = (slopes * slope).astype(k.dtype)
            grad_k = sums[0] + _product("bgets,btgek->bsgk", slopes, q)
            grad_v = sums[1] + _product("bgets,btgek->bsgk", chances.astype(v.dtype), cotangent)
            return (grad_k, grad_v), _product("bgets,bsgk->btgek", slopes, k)

        heads = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1)
        given = _grouped(q, k), _grouped(cotangent, k).astype(v.dtype), heads(log_sum), heads(dot)
        zeros = tuple(jnp.zeros_like(at_least_f32(x)) for x in (k, v))
        (grad_k, grad_v), grad_q = _scan_blocks(block_step, zeros, _blocks(given, positions))
        return _join_blocks(grad_q).reshape(q.shape), grad_k, grad_v


class KVCache(NamedTuple):
    """The keys and values of a layer; s is the context, filled from the start."""

    k: Float[Array, "b s g k"]
    v: Float[Array, "b s g k"]


def remembering(cache: KVCache, at: Int[Array, ""], rule: Causal) -> Any:
    """Return `attend(q, k, v)` for new tokens at `at`, `at` + 1, ...; it also returns the cache.

    Entries of the cache after the last new token are never seen.
    """

    def attend(q, k, v):
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
        new_cache = KVCache(put(cache.k, k), put(cache.v, v))
        positions = at + jnp.arange(q.shape[1], dtype=at.dtype)
        back = positions[:, None] - jnp.arange(cache.k.shape[1], dtype=at.dtype)[None]  # t s
        mask = back >= 0 if rule.window is None else (back >= 0) & (back < rule.window)
        scale = 1 / math.sqrt(q.shape[-1]) if rule.scale is None else rule.scale
        return attention_where(q, *new_cache, mask, scale=scale, soft_cap=rule.soft_cap), new_cache

    return attend


def _scores(rule, q, k, positions):
    """Return the scores b g e t s, and their slope in the products of q and k."""
    scale = 1 / math.sqrt(q.shape[-1]) if rule.scale is None else rule.scale
    scores, slope = _product("btgek,bsgk->bgets", q, k) * scale, scale
    if rule.soft_cap is not None:
        tanh = jnp.tanh(scores / rule.soft_cap)
        scores, slope = rule.soft_cap * tanh, scale * (1 - jnp.square(tanh))
    hide = lambda visible: jnp.where(visible, 0, HIDDEN).astype(scores.dtype)
    if positions.ahead is not None:
        index = lambda length: jnp.arange(length, dtype=jnp.int32)
        back = positions.ahead + index(q.shape[1])[:, None] - index(k.shape[1])[None]  # t s
        visible = back >= 0 if rule.window is None else (back >= 0) & (back < rule.window)
        scores += hide(visible)[None, None, None]
    if positions.segments is not None:
        q_segments, k_segments = positions.segments
        visible = q_segments[:, :, None] == k_segments[:, None]  # b t s
        scores += hide(visible)[:, None, None]
    return scores, slope


def _blocks(by_query, positions):
    """Cut arrays b t ... into blocks of queries, n b t/n ..., with the positions of each."""
    time = jax.tree.leaves(by_query)[0].shape[1]
    block = max(n for n in range(1, BLOCK + 1) if time % n == 0)
    if block < min(time, BLOCK // 8):  # a prime number of queries, for example
        block = time
    count = time // block

    def cut(x):
        return jnp.moveaxis(x.reshape(len(x), count, block, *x.shape[2:]), 1, 0)

    ahead, segments = positions.ahead, positions.segments
    if ahead is not None:
        ahead = ahead + jnp.arange(0, time, block, dtype=jnp.int32)
    if segments is not None:
        k_segments = jnp.broadcast_to(segments[1][None], (count, *segments[1].shape))
        segments = cut(segments[0]), k_segments
    return jax.tree.map(cut, by_query), BlockPositions(ahead, segments)


def _scan_blocks(step, start, blocks):
    """Scan over the blocks; a single block without a loop."""
    if len(jax.tree.leaves(blocks)[0]) > 1:
        return jax.lax.scan(step, start, blocks)
    end, result = step(start, jax.tree.map(lambda x: x[0], blocks))
    return end, jax.tree.map(lambda x: x[None], result)


def _join_blocks(x):
    """Reshape n b t/n ... to b t ..."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _grouped(x, k):
    """Reshape b t h k to b t g e k: the e heads that share a group of keys."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def _by_score(x):
    """Transpose b t g e to b g e t 1."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _product(dims, x, y):
    wide = jnp.float32 if jnp.dtype(x.dtype).itemsize < 4 else x.dtype
    return jnp.einsum(dims, x, y, preferred_element_type=wide)
