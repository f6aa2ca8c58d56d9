"""Ring attention: keys and values are sent from device to device, and queries stay.

A sequence is cut into 2n chunks, and device i of n has chunks i and 2n-1-i: an early chunk, which
sees little, and a late one, which sees much (zigzag). So every device computes 2n + 1 of the
n (2n + 1) pairs of chunks in which a query sees a key, and no other pair. A device computes with
one chunk while it receives the next. Gradients of keys and values follow them around the ring, and
are then sent to their own devices.

Sources: Liu et al. 2023, arXiv 2310.01889; Brandon et al. 2023, arXiv 2311.09431, who balance by
stripes; chunks in pairs as in Llama 3, 2024, arXiv 2407.21783, section 3.3.2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.errors import ShardingError
from jtrain.parallel.attention.protocol import BlockPositions, BlockwiseAttention


def zigzag(time: int, devices: int) -> np.ndarray:  # t
    """Return the positions on the devices, one device after the other, int32."""
    chunks = np.arange(time, dtype=np.int32).reshape(2 * devices, -1)
    pairs = [(device, 2 * devices - 1 - device) for device in range(devices)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)


def check_even_time(time: int, devices: int, *, chunks: int) -> None:
    """Raise unless the devices can have equal chunks of the positions.

    Raises:
        ShardingError: with the lengths and the numbers of devices that divide.
    """
    unit = chunks * devices
    if time % unit == 0:
        return
    lower, upper = time // unit * unit, -(-time // unit) * unit
    nearest = f"{lower} or {upper}" if lower else f"{upper}"
    fits = [str(n) for n in range(1, devices) if n == 1 or time % (chunks * n) == 0]
    each = "two chunks" if chunks == 2 else "one shard"
    raise ShardingError(
        f"{time} positions do not divide into {unit}: {each} for each of "
        f"parallel.context={devices}. Nearest: sequences of {nearest} (data.context); or "
        f"parallel.context of {', '.join(fits)}."
    )


def chunk_index(device: Int[Array, ""], half: int | Int[Array, ""], devices: int) -> Int[Array, ""]:
    """Return the number of the chunk that is the first (0) or second (1) half on a device."""
    return jnp.where(half == 0, device, 2 * devices - 1 - device)


def restore_order(x: Float[Array, "b t d"], devices: int, axis: str) -> Float[Array, "b t d"]:
    """Return a device's positions in the original order, in a `shard_map`.

    One of its two chunks has an even number and one an odd number; each is sent to the device of
    which it is the first or second half, half of `x` in each of two permutations.
    """
    device = jax.lax.axis_index(axis)
    first, second = jnp.split(x, 2, axis=1)
    even, odd = device % 2 == 0, device % 2 == 1
    last = 2 * devices - 1
    moves = lambda parity: [(i, (i if i % 2 == parity else last - i) // 2) for i in range(devices)]
    firsts = jax.lax.ppermute(jnp.where(even, first, second), axis, moves(0))
    seconds = jax.lax.ppermute(jnp.where(odd, first, second), axis, moves(1))
    return jnp.concatenate([firsts, seconds], axis=1)


NOTHING = -1e30  # the log of the sum of no weights


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Attention on the shards of one device, to be called in a `shard_map` over `axis`."""

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
        """Return the attention of the device's queries to the keys of all devices.

        Args:
            q: queries of the device, two chunks.
            segments: of all devices.
        """
        return _attend(self, q, k, v, segments)

    def runs(self, chunk: int) -> list[tuple[int, int]]:
        """Return the directions in which keys are sent, and the number of hops.

        Once around; or to both sides, if the window reaches only that far.
        """
        window, around = self.attention.window, self.devices - 1
        reach = around if window is None else -(-(window - 1) // chunk)
        if 2 * reach >= around:
            return [(1, around)] if around else []
        return [(1, reach), (-1, reach)] if reach else []

    def source(self, hops: int | Int[Array, ""]) -> Int[Array, ""]:
        """Return the index of the device that is `hops` before this one."""
        return (jax.lax.axis_index(self.axis) - hops) % self.devices

    def shift(self, tree: Any, by: int) -> Any:
        """Return the arrays of the device `by` places before this one."""
        moves = [(i, (i + by) % self.devices) for i in range(self.devices)]
        return jax.lax.ppermute(tree, self.axis, moves)

    def visible_halves(self, source: Int[Array, ""] | None) -> tuple[list, list]:
        """Return pairs of halves: of the local queries and of the keys of `source` (None: own)."""
        if source is None:
            return [0, 1, 1], [0, 0, 1]
        nearer = jnp.where(source < jax.lax.axis_index(self.axis), 0, 1)
        return [1, nearer], [0, nearer]

    def block_positions(
        self, chunk: int, segments: Any, source: Int[Array, ""] | None
    ) -> BlockPositions:
        """Return the positions of each pair; arrays have the pair as leading dim."""
        here = jax.lax.axis_index(self.axis)
        q_halves, k_halves = self.visible_halves(source)
        ahead, ids = None, None
        other = here if source is None else source
        if source is None or self.attention.window is not None:
            number = functools.partial(chunk_index, devices=self.devices)
            pairs = zip(q_halves, k_halves, strict=True)
            ahead = chunk * jnp.stack([number(here, i) - number(other, j) for i, j in pairs])
        if segments is not None:
            chunk_ids = lambda device, half: jax.lax.dynamic_slice_in_dim(
                segments, (2 * device + half) * chunk, chunk, axis=1
            )
            q_ids = jnp.stack([chunk_ids(here, i) for i in q_halves])
            ids = q_ids, jnp.stack([chunk_ids(other, j) for j in k_halves])
        return BlockPositions(ahead, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring, q, k, v, segments):
    return _forward(ring, q, k, v, segments)[0]


def _forward(ring, q, k, v, segments):
    q, k, v = (_halves(x) for x in (q, k, v))
    chunk = q.shape[2]

    def visit(means, kv, source=None):
        q_halves, k_halves = ring.visible_halves(source)
        positions = ring.block_positions(chunk, segments, source)
        inputs = _take(q, q_halves), *_take(kv, k_halves), positions
        parts = _unstack(jax.vmap(ring.attention.part)(*inputs))
        for half, part in zip(q_halves, parts, strict=True):
            means = _put(means, half, _combine(_at(means, half), part))
        return means

    def step(direction, state, hops_away, first, last):
        del first
        kv, means = state
        next_kv = kv if last else ring.shift(kv, direction)  # while the device computes with `kv`
        return next_kv, visit(means, kv, ring.source(direction * hops_away))

    zeros = jnp.zeros_like(at_least_f32(q))
    means = visit((zeros, jnp.full(q.shape[:-1], NOTHING, zeros.dtype)), (k, v))
    for direction, hops in ring.runs(chunk):
        state = ring.shift((k, v), direction), means
        _, means = _run_hops(hops, functools.partial(step, direction), state)
    # The name is that of a transformer's `saved`: if saved, the backward pass resends nothing.
    out, log_sum = (checkpoint_name(x, "attention") for x in (means[0].astype(q.dtype), means[1]))
    return _join_halves(out), (q, k, v, segments, out, log_sum)


def _backward(ring, saved, cotangent):
    q, k, v, segments, out, log_sum = saved
    chunk, cotangent = q.shape[2], _halves(cotangent)
    # Without a barrier the compiler saves two received chunks of the forward pass instead of
    # repeating two hops.
    k, v, cotangent = jax.lax.optimization_barrier((k, v, cotangent))
    cotangent_out = (cotangent.astype(log_sum.dtype) * out).sum(-1)  # 2 b c h
    by_query = log_sum, cotangent_out, cotangent
    zeros = lambda x: jnp.zeros(x.shape, log_sum.dtype)

    def visit(grad_q, kv, source=None):
        grads = zeros(k), zeros(v)
        q_halves, k_halves = ring.visible_halves(source)
        positions = ring.block_positions(chunk, segments, source)
        inputs = _take(q, q_halves), *_take(kv, k_halves), positions, *_take(by_query, q_halves)
        parts = _unstack(jax.vmap(ring.attention.part_gradient)(*inputs))
        for q_half, k_half, (part_q, *part_kv) in zip(q_halves, k_halves, parts, strict=True):
            grad_q = _put(grad_q, q_half, _at(grad_q, q_half) + part_q)
            grads = _put(grads, k_half, _sum(_at(grads, k_half), tuple(part_kv)))
        return grad_q, grads

    def step(direction, state, hops_away, first, last):
        kv, grads, grad_q = state
        next_kv = kv if last else ring.shift(kv, direction)
        arrived = None if first else ring.shift(grads, direction)
        grad_q, grads = visit(grad_q, kv, ring.source(direction * hops_away))
        return next_kv, grads if first else _sum(arrived, grads), grad_q

    grad_q, grads = visit(zeros(q), (k, v))
    for direction, hops in ring.runs(chunk):
        state = ring.shift((k, v), direction), None, grad_q
        _, sent_grads, grad_q = _run_hops(hops, functools.partial(step, direction), state)
        grads = _sum(grads, ring.shift(sent_grads, -direction * hops))
    return *(_join_halves(x).astype(q.dtype) for x in (grad_q, *grads)), None


_attend.defvjp(_forward, _backward)


def _run_hops(hops, step, state):
    """Run `step(state, hops_away, first, last)` for 1 .. `hops` hops away."""
    state = step(state, 1, True, hops == 1)
    if hops > 2:
        between = lambda state, hops_away: (step(state, hops_away, False, False), None)
        state, _ = jax.lax.scan(between, state, jnp.arange(2, hops, dtype=jnp.int32))
    return step(state, hops, False, True) if hops > 1 else state


def _combine(one, other):
    """Combine two weighted means into one, with the log of the sum of all weights."""
    log_sum = jnp.logaddexp(one[1], other[1])
    share = lambda mean: jnp.exp(mean[1] - log_sum)[..., None] * mean[0]
    return share(one) + share(other), log_sum


def _sum(x, y):
    return jax.tree.map(jnp.add, x, y)


def _halves(x):
    """Reshape b t ... to 2 b t/2 ...: the two chunks."""
    return jnp.stack(jnp.split(x, 2, axis=1))


def _join_halves(x):
    """Reshape 2 b t/2 ... to b t ..."""
    return jnp.concatenate(tuple(x), axis=1)


def _at(tree, half):
    """Return the arrays of one half."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, half, keepdims=False), tree)


def _take(tree, halves):
    """Stack the arrays of several halves."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[_at(tree, half) for half in halves])


def _unstack(tree):
    """Split arrays along their first dim into a list of trees."""
    count = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


def _put(tree, half, parts):
    """Return the arrays with one half replaced."""
    update = lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, half, 0)
    return jax.tree.map(update, tree, parts)
