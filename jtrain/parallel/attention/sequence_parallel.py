"""Attention over a mesh: what each device computes, and what it exchanges with whom."""

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
from jtrain.parallel.attention.ulysses import refuse_few_groups, ulysses
from jtrain.parallel.attention.zigzag import in_order, refuse_uneven_time, zigzag
from jtrain.parallel.rules import split_evenly

ContextBy: TypeAlias = Literal["ring", "ulysses"]
CONTEXT = "context"  # the mesh axis that sequences are split over


class SequenceParallelAttention:
    """Attention of arrays that lie over a mesh by `rules`, and of sequences split as `by` says."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, tuple[str, ...]], by: ContextBy):
        self._mesh, self._sizes, self._by = mesh, dict(mesh.shape), by
        self._rules = {**rules, "time": (CONTEXT,)}
        self._parts = self._sizes.get(CONTEXT, 1)
        self._platform = mesh.devices.flat[0].platform

    def order(self, time: int) -> np.ndarray | None:
        """The order of positions in which the devices have the same work; None: their own.

        Raises:
            ShardingError: if the devices cannot have as many each.
        """
        if self._parts == 1:
            return None
        refuse_uneven_time(time, self._parts, chunks=2 if self._by == "ring" else 1)
        return zigzag(time, self._parts) if self._by == "ring" else None

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x`, whose positions are in that order, in their own."""
        if self.order(x.shape[1]) is None:
            return x
        lies = self._spec(x, "rows", "time", None)
        return self._by_device(lambda x: in_order(x, self._parts, CONTEXT), (lies,), lies)(x)

    def attend(
        self,
        attention: Attention,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s g k"],
        v: Float[Array, "b s g k"],
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """`attention(q, k, v, segments)`.

        By the compiler, if it can split it and time is whole; else on each device what is its own,
        in a `shard_map` over the axes of rows, heads and time.

        Raises:
            ShardingError: if time or heads do not divide, or the ring is asked for a kernel.
        """
        if self._parts > 1 and isinstance(attention, BlockwiseAttention):
            time, here = "time", self._across(attention, q.shape[1], k.shape[2])
        elif attention.kernel and self._mesh.size > 1:
            time, here = None, lambda *own: attention(*own, platform=self._platform)
        else:
            return attention(q, k, v, segments, platform=self._platform)
        of_q = self._spec(q, "batch", time, "heads", None)
        of_kv = self._spec(k, "batch", time, "kv_heads", None)
        given, lies = (q, k, v), (of_q, of_kv, of_kv)
        if segments is not None:
            given, lies = (*given, segments), (*lies, self._spec(segments, "batch", None))
        return self._by_device(here, lies, of_q)(*given)

    def _across(
        self, attention: BlockwiseAttention, time: int, groups: int
    ) -> Callable[..., Array]:
        """What a device computes of its part of sequences, and exchanges."""
        self.order(time)
        if self._by == "ulysses":
            refuse_few_groups(groups, self._parts, self._sizes.get("tensor", 1))
            return lambda *own: ulysses(attention, CONTEXT, self._platform, *own)
        if attention.kernel:
            raise ShardingError(
                f"parallel.context={self._parts} by a ring combines parts of attention, and the "
                f"kernel asked for ({attention}) has no gradient of a part. Take "
                f"model.attention=xla, whose parts are computed in blocks, or "
                f"parallel.context_by=ulysses, which takes any kernel."
            )
        return RingAttention(attention, self._parts, CONTEXT)

    def _spec(self, x: Array, *dims: str | None) -> P:
        return split_evenly(x.shape, dims, self._rules, self._sizes).spec

    def _by_device(self, fn: Callable, given: tuple[P, ...], result: P) -> Callable[..., Array]:
        # Unchecked: a kernel does not say over what its result varies.
        return jax.shard_map(fn, mesh=self._mesh, in_specs=given, out_specs=result, check_vma=False)
