"""Attention over a mesh: computation on each device and exchange between devices."""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jtrain.errors import ShardingError
from jtrain.parallel.attention.protocol import Attention, BlockwiseAttention
from jtrain.parallel.attention.ring import RingAttention, check_even_time, restore_order, zigzag
from jtrain.parallel.explicit import keeps_split
from jtrain.parallel.rules import split_evenly

ContextBy: TypeAlias = Literal["ring", "ulysses"]
CONTEXT = "context"  # the mesh axis that sequences are split over


class SequenceParallelAttention:
    """Attention of arrays sharded over a mesh by `rules`; `by` handles sharded sequences.

    Args:
        repeats: rounds of a microbatch through a pipeline.
    """

    def __init__(
        self, mesh: Mesh, rules: Mapping[str, tuple[str, ...]], by: ContextBy, *, repeats: int = 1
    ):
        self._mesh, self._sizes, self._by = mesh, dict(mesh.shape), by
        self._repeats = repeats
        self._rules = {**rules, "time": (CONTEXT,)}
        self._parts = self._sizes.get(CONTEXT, 1)
        self._platform = mesh.devices.flat[0].platform

    def order(self, time: int) -> np.ndarray | None:
        """Return the order of positions with equal work on all devices; None: unchanged.

        Raises:
            ShardingError: if the devices cannot have equal shards.
        """
        if self._parts == 1:
            return None
        check_even_time(time, self._parts, chunks=2 if self._by == "ring" else 1)
        return zigzag(time, self._parts) if self._by == "ring" else None

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return `x` with the positions of `order` in their original order."""
        if self.order(x.shape[1]) is None:
            return x
        spec = self._spec(x, "rows", "time", None)
        return self._by_device(lambda x: restore_order(x, self._parts, CONTEXT), (spec,), spec)(x)

    def attend(
        self,
        attention: Attention,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """Return `attention(q, k, v, segments)`.

        The compiler splits attention without a kernel over unsharded time. Other attention runs on
        the shards of each device, in a `shard_map` over the axes of rows, heads and time.

        Raises:
            ShardingError: if time or heads do not divide, a ring would need a kernel, or a
                pipeline with repeats would split sequences.
        """
        return keeps_split(functools.partial(self._attend, attention), 3)(q, k, v, segments)

    def _attend(self, attention, q, k, v, segments):
        if self._parts > 1 and isinstance(attention, BlockwiseAttention):
            time, fn = "time", self._across(attention, q, k)
        elif attention.kernel and self._mesh.size > 1:
            time, fn = None, lambda *own: attention(*own, platform=self._platform)
        else:
            return attention(q, k, v, segments, platform=self._platform)
        q_spec = self._spec(q, "batch", time, "heads", None)
        kv_spec = self._spec(k, "batch", time, "kv_heads", None)
        arrays, specs = (q, k, v), (q_spec, kv_spec, kv_spec)
        if segments is not None:
            arrays, specs = (*arrays, segments), (*specs, self._spec(segments, "batch", None))
        return self._by_device(fn, specs, q_spec)(*arrays)

    def _across(
        self, attention: BlockwiseAttention, q: Float[Array, "b t h k"], k: Float[Array, "b s g k"]
    ) -> Callable[..., Array]:
        if self._repeats > 1:  # differentiated within a vmap, which cannot batch the residuals
            raise ShardingError(
                f"parallel.context={self._parts} splits sequences, and the stages of a pipeline "
                f"with parallel.repeats={self._repeats} cannot exchange them. Take "
                f"parallel.repeats=1, or parallel.context=1."
            )
        self.order(q.shape[1])
        if self._by == "ulysses":
            check_whole_heads(q.shape[2], k.shape[2], self._parts, self._sizes.get("tensor", 1))
            return lambda *own: ulysses(attention, CONTEXT, self._platform, *own)
        if attention.kernel:
            raise ShardingError(
                f"parallel.context={self._parts} by a ring combines attention over blocks, and "
                f"the kernel {attention} has no gradient of a block. Take "
                f"model.attention=xla, which is computed in blocks, or "
                f"parallel.context_by=ulysses, which takes any kernel."
            )
        return RingAttention(attention, self._parts, CONTEXT)

    def _spec(self, x: Array, *dims: str | None) -> P:
        return split_evenly(x.shape, dims, self._rules, self._sizes).spec

    def _by_device(self, fn: Callable, given: tuple[P, ...], result: P) -> Callable[..., Array]:
        # Unchecked: a kernel does not declare the axes over which its result varies.
        return jax.shard_map(fn, mesh=self._mesh, in_specs=given, out_specs=result, check_vma=False)


def ulysses(
    attention: Attention,
    axis: str,
    platform: str,
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    segments: Int[Array, "b s"] | None = None,
) -> Float[Array, "b t h k"]:
    """Return `attention` on the shards of a device, in a `shard_map` over `axis`; kernels too.

    Positions are in their original order, and the number of devices must divide `g`. `segments` are
    those of all devices.
    """
    to_heads = lambda x: jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
    to_time = lambda x: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
    return to_time(attention(to_heads(q), to_heads(k), to_heads(v), segments, platform=platform))


def check_whole_heads(heads: int, groups: int, devices: int, tensor: int) -> None:
    """Raise unless each device can have complete groups of heads.

    Raises:
        ShardingError: with the numbers of devices that divide the groups.
    """
    local = groups // tensor
    if local % devices == 0:
        return
    fits = ", ".join(str(n) for n in range(1, devices) if local % n == 0)
    name = "heads" if groups == heads else "kv_heads"  # a config gives only fewer
    over = f" over parallel.tensor={tensor}" if tensor > 1 else ""
    raise ShardingError(
        f"{groups} {name}{over} do not divide into parallel.context={devices}: with "
        f"context_by=ulysses each device has complete heads. Take parallel.context of {fits}, or "
        f"parallel.context_by=ring, which splits no heads."
    )
