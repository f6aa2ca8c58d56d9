"""Attention of some queries to some keys, to be combined with what other keys give.

The scores are there for at most `BLOCK` queries at a time, and at least float32.
Sources: the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867; its gradient as in
FlashAttention, Dao et al. 2022, arXiv 2205.14135.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32
from jtrain.parallel.attention.protocol import BlockPositions

BLOCK = 512
HIDDEN = -1e30  # added to a score that shall count for nothing beside one that is seen


class ScoreRule(NamedTuple):
    """What a score is and how far back one sees."""

    window: int | None
    soft_cap: float | None
    scale: float | None


def part(
    sight: ScoreRule,
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    stand: BlockPositions,
) -> tuple[Float[Array, "b t h k"], Float[Array, "b t h"]]:
    """The weighted mean of the values, and the log of the sum of the weights, at least float32.

    For a query that sees none of the keys these are some finite numbers, and about `HIDDEN`.
    """

    def of(_, block):
        q, here = block
        scores, _ = _scores(sight, q, k, here)
        top = scores.max(-1, keepdims=True)
        powers = jnp.exp(scores - top)
        total = powers.sum(-1, keepdims=True)  # b g e t 1
        mean = _product("bgets,bsgk->btgek", powers.astype(v.dtype), v)
        return None, (mean / jnp.moveaxis(total, 3, 1), _by_query(top + jnp.log(total)))

    _, (mean, log_sum) = _through(of, None, _blocks(_grouped(q, k), stand))
    return _joined(mean).reshape(q.shape), _joined(log_sum).reshape(q.shape[:3])


def part_gradient(
    sight: ScoreRule,
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    stand: BlockPositions,
    log_sum: Float[Array, "b t h"],
    along: Float[Array, "b t h"],
    cotangent: Float[Array, "b t h k"],
) -> tuple[Float[Array, "b t h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
    """What these keys and values add to the gradients in q, k and v, at least float32.

    Args:
        log_sum: the log of the sum of the weights of all keys, these and others.
        along: `cotangent` x what all keys together gave, summed over each head.
        cotangent: of what all keys together gave.
    """

    def of(sums, block):
        (q, cotangent, log_sum, along), here = block
        scores, bend = _scores(sight, q, k, here)
        chances = jnp.exp(scores - _by_score(log_sum))
        slopes = chances * (_product("btgek,bsgk->bgets", cotangent, v) - _by_score(along))
        slopes = (slopes * bend).astype(k.dtype)
        grad_k = sums[0] + _product("bgets,btgek->bsgk", slopes, q)
        grad_v = sums[1] + _product("bgets,btgek->bsgk", chances.astype(v.dtype), cotangent)
        return (grad_k, grad_v), _product("bgets,bsgk->btgek", slopes, k)

    heads = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1)
    given = _grouped(q, k), _grouped(cotangent, k).astype(v.dtype), heads(log_sum), heads(along)
    none = tuple(jnp.zeros_like(at_least_f32(x)) for x in (k, v))
    (grad_k, grad_v), grad_q = _through(of, none, _blocks(given, stand))
    return _joined(grad_q).reshape(q.shape), grad_k, grad_v


def _scores(sight, q, k, stand):
    """The scores b g e t s, and their slope in the products of q and k."""
    scale = 1 / math.sqrt(q.shape[-1]) if sight.scale is None else sight.scale
    scores, bend = _product("btgek,bsgk->bgets", q, k) * scale, scale
    if sight.soft_cap is not None:
        bent = jnp.tanh(scores / sight.soft_cap)
        scores, bend = sight.soft_cap * bent, scale * (1 - jnp.square(bent))
    hide = lambda seen: jnp.where(seen, 0, HIDDEN).astype(scores.dtype)
    if stand.ahead is not None:
        places = lambda length: jnp.arange(length, dtype=jnp.int32)
        back = stand.ahead + places(q.shape[1])[:, None] - places(k.shape[1])[None]  # t s
        seen = back >= 0 if sight.window is None else (back >= 0) & (back < sight.window)
        scores += hide(seen)[None, None, None]
    if stand.segments is not None:
        of_queries, of_keys = stand.segments
        seen = of_queries[:, :, None] == of_keys[:, None]  # b t s
        scores += hide(seen)[:, None, None]
    return scores, bend


def _blocks(by_query, stand):
    """Arrays b t ... cut in blocks of queries, n b t/n ..., each with where it stands."""
    time = jax.tree.leaves(by_query)[0].shape[1]
    block = max(n for n in range(1, BLOCK + 1) if time % n == 0)
    block = block if block >= min(time, BLOCK // 8) else time  # a prime number of them, say
    count = time // block

    def cut(x):
        return jnp.moveaxis(x.reshape(len(x), count, block, *x.shape[2:]), 1, 0)

    ahead, segments = stand.ahead, stand.segments
    if ahead is not None:
        ahead = ahead + jnp.arange(0, time, block, dtype=jnp.int32)
    if segments is not None:
        of_keys = jnp.broadcast_to(segments[1][None], (count, *segments[1].shape))
        segments = cut(segments[0]), of_keys
    return jax.tree.map(cut, by_query), BlockPositions(ahead, segments)


def _through(of, start, blocks):
    """`jax.lax.scan`, and no loop where there is one block."""
    if len(jax.tree.leaves(blocks)[0]) > 1:
        return jax.lax.scan(of, start, blocks)
    end, result = of(start, jax.tree.map(lambda x: x[0], blocks))
    return end, jax.tree.map(lambda x: x[None], result)


def _joined(x):
    """n b t/n ... as b t ..."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _grouped(x, k):
    """b t h k as b t g e k: the e heads that share a group of keys."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def _by_query(x):
    """b g e t 1 as b t g e."""
    return jnp.moveaxis(x[..., 0], 3, 1)


def _by_score(x):
    """b t g e as b g e t 1."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _product(dims, x, y):
    wide = jnp.float32 if jnp.dtype(x.dtype).itemsize < 4 else x.dtype
    return jnp.einsum(dims, x, y, preferred_element_type=wide)
