"""Changes of the parameters, a byte a number: servers send them, and workers add them to theirs.

Source: the error feedback of the servers in Tang et al. 2019, https://arxiv.org/abs/1905.05957.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jtrain.server.shards.codec import Arrays, Codec


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
