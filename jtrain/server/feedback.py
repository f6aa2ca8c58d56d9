"""Error feedback: what compression removes from a message is added to the next one.

Sources: of pushes, Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847; of the changes of
the parameters that servers send, Tang et al. 2019, https://arxiv.org/abs/1905.05957.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jtrain.core.types import Params
from jtrain.server.codec import Arrays, Codec
from jtrain.server.partition import Partition


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


class Published(NamedTuple):
    """Answer to a pull."""

    stamp: str
    """Name of what the worker has afterwards."""
    kind: Literal["nothing", "change", "all"]
    arrays: list[np.ndarray]


class Publisher:
    """Server's side: the newest change of a part.

    What a change leaves out by rounding is in the next one, for each is the difference between the
    parameters and what workers have.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self.reset()

    def reset(self) -> None:
        """Forget the newest change: the parameters are others now."""
        self._stamp, self._before = secrets.token_hex(8), ""
        self._change: list[np.ndarray] = []

    def publish(self, params: Arrays, published: Arrays) -> list[np.ndarray]:
        """Encode what has changed, and return what workers have with it."""
        wide = [np.asarray(leaf, np.float32) for leaf in params]
        change = [
            new - np.asarray(old, np.float32) for new, old in zip(wide, published, strict=True)
        ]
        self._stamp, self._before = secrets.token_hex(8), self._stamp
        self._change = self._codec.encode(change)
        return add_change(self._codec, self._change, published)

    def answer(self, known: str, published: Arrays) -> Published:
        """Return what a worker lacks that has what the stamp `known` says."""
        if known == self._stamp:
            return Published(self._stamp, "nothing", [])
        if known == self._before:
            return Published(self._stamp, "change", self._change)
        return Published(self._stamp, "all", list(published))


class Subscriber:
    """Worker's side: the parts that it has."""

    def __init__(self, codec: Codec):
        self._codec = codec
        self._parts: dict[int, tuple[str, list[np.ndarray]]] = {}

    def known(self, part: int) -> str:
        """Return the stamp of a part."""
        return self._parts[part][0] if part in self._parts else "none"

    def take(self, part: int, reply: Published) -> list[np.ndarray]:
        """Return the leaves of a part, with a reply to a pull in them."""
        whole = reply.kind == "all"
        leaves = [np.array(leaf) for leaf in reply.arrays] if whole else self._parts[part][1]
        if reply.kind == "change":
            leaves = add_change(self._codec, reply.arrays, leaves)
        self._parts[part] = reply.stamp, leaves
        return leaves


def add_change(codec: Codec, change: Arrays, leaves: Sequence[Any]) -> list[np.ndarray]:
    """Return leaves with an encoded change added, the same bits for servers and workers."""
    read = codec.decode(change, leaves)
    return [np.asarray(leaf) + each for leaf, each in zip(leaves, read, strict=True)]
