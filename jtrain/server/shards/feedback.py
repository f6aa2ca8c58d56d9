"""Error feedback: what compression removes from a push is added to the next one.

Source: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.types import Params
from jtrain.server.shards.codec import Arrays, Codec
from jtrain.server.shards.partition import Partition


class Encoded(NamedTuple):
    """The push of a part."""

    arrays: list[np.ndarray]
    """What is sent."""
    sent: list[np.ndarray]
    """The leaves that the server will read."""
    left: list[np.ndarray]
    """What was not sent of each leaf; empty without feedback."""


class PushEncoder:
    """Encoder of a worker's pushes, with what earlier ones have not sent.

    Args:
        partition: of the parameters, into parts that are pushed one by one.
        keeps: whether the residual is kept.
    """

    def __init__(self, codec: Codec, partition: Partition, *, keeps: bool):
        self._codec, self._partition, self._keeps = codec, partition, keeps
        self._residual: dict[int, list[np.ndarray]] = {}

    def encode(self, part: int, leaves: Sequence[Any]) -> Encoded:
        """Return the push of the leaves of a part; the residual is as before until `keep`."""
        leaves = [np.asarray(leaf) for leaf in leaves]
        if not self._keeps:
            arrays = self._codec.encode(leaves)
            return Encoded(arrays, self._codec.decode(arrays, leaves), [])
        before = self._residual.get(part)
        wanted = [leaf.astype(np.float32, copy=False) for leaf in leaves]
        if before is not None:
            wanted = [leaf + rest for leaf, rest in zip(wanted, before, strict=True)]
        arrays = self._codec.encode(wanted)
        sent = self._codec.decode(arrays, wanted)
        left = [leaf - read for leaf, read in zip(wanted, sent, strict=True)]
        return Encoded(arrays, sent, left)

    def keep(self, part: int, pushed: Encoded) -> None:
        """Keep what a push has left, for the next one of the part."""
        if self._keeps:
            self._residual[part] = pushed.left

    def load(self, residual: Any) -> None:
        """Replace the residual by a tree of the parameters' structure; (): zeros."""
        parts = range(len(self._partition.shards)) if self._keeps and residual != () else ()
        of = self._partition.of_params
        self._residual = {part: jax.tree.leaves(of(residual, part)) for part in parts}

    def residual(self, like: Params) -> Any:
        """Return the residual as a tree; () if none is kept."""
        if not self._keeps:
            return ()
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), like)
        of = self._partition.of_params
        parts: list[Arrays] = [
            self._residual.get(part) or jax.tree.leaves(of(zeros, part))
            for part in range(len(self._partition.shards))
        ]
        return self._partition.join(zeros, parts)
