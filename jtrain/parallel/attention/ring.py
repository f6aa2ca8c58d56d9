"""Ring attention: keys and values travel from device to device, and queries stay.

Every device computes 2n + 1 of the n (2n + 1) pairs of chunks in which a query sees a key, and none
in which it sees none: see `zigzag.py`. While one computes with what it has, what comes next is on
its way. Gradients of keys and values travel behind them and then home.

Source: Liu et al. 2023, arXiv 2310.01889.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.parallel.attention.protocol import BlockPositions, BlockwiseAttention
from jtrain.parallel.attention.zigzag import chunk_of

NOTHING = -1e30  # the log of the sum of no weights


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Attention of what one device has, to be called in a `shard_map` over `axis`."""

    attention: BlockwiseAttention
    devices: int
    axis: str

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b t g k"],
        v: Float[Array, "b t g k"],
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """What its queries take from the values of all devices.

        Args:
            q: its queries: two chunks.
            k: its keys.
            v: its values.
            segments: of all devices.
        """
        return _attend(self, q, k, v, segments)

    def runs(self, chunk: int) -> list[tuple[int, int]]:
        """The directions in which keys travel, and how far.

        Once around; or to both sides, where a window of `chunk` and fewer reaches no farther.
        """
        window, around = self.attention.window, self.devices - 1
        reach = around if window is None else -(-(window - 1) // chunk)
        if 2 * reach >= around:
            return [(1, around)]
        return [(1, reach), (-1, reach)] if reach else []

    def source(self, far: int | Int[Array, ""]) -> Int[Array, ""]:
        """The device `far` places before this one."""
        return (jax.lax.axis_index(self.axis) - far) % self.devices

    def shift(self, tree: Any, by: int) -> Any:
        """What the device `by` places before this one has."""
        moves = [(i, (i + by) % self.devices) for i in range(self.devices)]
        return jax.lax.ppermute(tree, self.axis, moves)

    def meet(self, source: Int[Array, ""] | None) -> tuple[list, list]:
        """Which halves of the queries here see which of the keys of `source`, its own if None."""
        if source is None:
            return [0, 1, 1], [0, 0, 1]
        nearer = jnp.where(source < jax.lax.axis_index(self.axis), 0, 1)
        return [1, nearer], [0, nearer]

    def stand(self, chunk: int, segments: Any, source: Int[Array, ""] | None) -> BlockPositions:
        """Where they stand, each array with a leading dim: the pair."""
        here = jax.lax.axis_index(self.axis)
        mine, theirs = self.meet(source)
        ahead, ids = None, None
        there = here if source is None else source
        if source is None or self.attention.window is not None:
            number = functools.partial(chunk_of, devices=self.devices)
            pairs = zip(mine, theirs, strict=True)
            ahead = chunk * jnp.stack([number(here, i) - number(there, j) for i, j in pairs])
        if segments is not None:
            of = lambda device, half: jax.lax.dynamic_slice_in_dim(
                segments, (2 * device + half) * chunk, chunk, axis=1
            )
            ids = jnp.stack([of(here, i) for i in mine]), jnp.stack([of(there, j) for j in theirs])
        return BlockPositions(ahead, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring, q, k, v, segments):
    return _forward(ring, q, k, v, segments)[0]


def _forward(ring, q, k, v, segments):
    q, k, v = (_halves(x) for x in (q, k, v))
    chunk = q.shape[2]

    def visit(done, kv, source=None):
        mine, theirs = ring.meet(source)
        given = _take(q, mine), *_take(kv, theirs), ring.stand(chunk, segments, source)
        for half, part in zip(mine, _each(jax.vmap(ring.attention.part)(*given)), strict=True):
            done = _put(done, half, _combined(_at(done, half), part))
        return done

    def step(way, state, far, first, last):
        del first
        kv, done = state
        coming = kv if last else ring.shift(kv, way)  # on its way while this one is used
        return coming, visit(done, kv, ring.source(way * far))

    none = jnp.zeros_like(at_least_f32(q))
    done = visit((none, jnp.full(q.shape[:-1], NOTHING, none.dtype)), (k, v))
    for way, hops in ring.runs(chunk):
        state = ring.shift((k, v), way), done
        _, done = _along(hops, functools.partial(step, way), state)
    # By the name that a transformer's `saved` has: with it nothing travels again.
    out, log_sum = (checkpoint_name(x, "attention") for x in (done[0].astype(q.dtype), done[1]))
    return _whole(out), (q, k, v, segments, out, log_sum)


def _backward(ring, kept, cotangent):
    q, k, v, segments, out, log_sum = kept
    chunk, cotangent = q.shape[2], _halves(cotangent)
    # Else the compiler keeps what has come from two others on the way forward, instead of two hops.
    k, v, cotangent = jax.lax.optimization_barrier((k, v, cotangent))
    along = (cotangent.astype(log_sum.dtype) * out).sum(-1)  # 2 b c h
    told, zeros = (log_sum, along, cotangent), lambda x: jnp.zeros(x.shape, log_sum.dtype)

    def visit(grad_q, kv, source=None):
        grads = zeros(k), zeros(v)
        mine, theirs = ring.meet(source)
        stand = ring.stand(chunk, segments, source)
        given = _take(q, mine), *_take(kv, theirs), stand, *_take(told, mine)
        added = _each(jax.vmap(ring.attention.part_gradient)(*given))
        for i, j, (add_q, *add) in zip(mine, theirs, added, strict=True):
            grad_q = _put(grad_q, i, _at(grad_q, i) + add_q)
            grads = _put(grads, j, _sum(_at(grads, j), tuple(add)))
        return grad_q, grads

    def step(way, state, far, first, last):
        kv, grads, grad_q = state
        coming = kv if last else ring.shift(kv, way)
        arrived = None if first else ring.shift(grads, way)
        grad_q, grads = visit(grad_q, kv, ring.source(way * far))
        return coming, grads if first else _sum(arrived, grads), grad_q

    grad_q, grads = visit(zeros(q), (k, v))
    for way, hops in ring.runs(chunk):
        state = ring.shift((k, v), way), None, grad_q
        _, others, grad_q = _along(hops, functools.partial(step, way), state)
        grads = _sum(grads, ring.shift(others, -way * hops))
    return *(_whole(x).astype(q.dtype) for x in (grad_q, *grads)), None


_attend.defvjp(_forward, _backward)


def _along(hops, step, state):
    """`state` after `step(state, far, first, last)` at 1 .. `hops` places from home."""
    state = step(state, 1, True, hops == 1)
    if hops > 2:
        between = lambda state, far: (step(state, far, False, False), None)
        state, _ = jax.lax.scan(between, state, jnp.arange(2, hops, dtype=jnp.int32))
    return step(state, hops, False, True) if hops > 1 else state


def _combined(done, part):
    """Two weighted means as one, and the log of the sum of all weights."""
    log_sum = jnp.logaddexp(done[1], part[1])
    share = lambda of: jnp.exp(of[1] - log_sum)[..., None] * of[0]
    return share(done) + share(part), log_sum


def _sum(x, y):
    return jax.tree.map(jnp.add, x, y)


def _halves(x):
    """b t ... as 2 b t/2 ...: the two chunks."""
    return jnp.stack(jnp.split(x, 2, axis=1))


def _whole(x):
    """2 b t/2 ... as b t ..."""
    return jnp.concatenate(tuple(x), axis=1)


def _at(tree, half):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, half, keepdims=False), tree)


def _take(tree, halves):
    """Several halves of each array, with a leading dim."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[_at(tree, half) for half in halves])


def _each(stacked):
    """The trees of which `stacked` is one, along the leading dim."""
    count = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]


def _put(tree, half, parts):
    place = lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, half, 0)
    return jax.tree.map(place, tree, parts)
