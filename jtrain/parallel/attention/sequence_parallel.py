"""Attention over a mesh: computation on each device and exchange between devices."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jtrain.errors import ShardingError
from jtrain.parallel.attention.protocol import Attention, BlockwiseAttention
from jtrain.parallel.attention.ring import RingAttention
from jtrain.parallel.attention.ulysses import check_whole_heads, ulysses
from jtrain.parallel.attention.zigzag import check_even_time, restore_order, zigzag
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

        The compiler splits attention that is no kernel over unsharded time. Other attention runs on
        the shards of each device, in a `shard_map` over the axes of rows, heads and time.

        Raises:
            ShardingError: if time or heads do not divide, a ring would need a kernel, or a
                pipeline with repeats would split sequences.
        """
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
        """Return the function of a device's shard of time, with its exchange."""
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
