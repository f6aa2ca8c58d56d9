"""Codecs of pushes: arrays of few bytes for the leaves of a gradient, and back; error feedback.

The leaves of a part are one run of float32 numbers, cut into blocks. A number that is not finite
makes its whole block NaN, so that it is not hidden. What compression removes from a message is
added to the next one.

Sources: of pushes, Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847; of the changes of
the parameters that servers send, Tang et al. 2019, https://arxiv.org/abs/1905.05957.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jtrain.core.types import Params
from jtrain.parallel.strategies.server_modes import E3M0, BFloat16, Compression, Int4, Int8, TopK
from jtrain.server.partition import Partition

Arrays = Sequence[np.ndarray]


class Codec(NamedTuple):
    """Codec of one run of float32 numbers; without functions, of the leaves as they are."""

    encode_flat: Callable[[np.ndarray], list[np.ndarray]] | None = None
    """Returns the arrays to send."""
    decode_flat: Callable[[Arrays, int], np.ndarray] | None = None
    """Returns so many numbers."""

    def encode(self, leaves: Arrays) -> list[np.ndarray]:
        """Return the arrays to send."""
        if self.encode_flat is None:
            return list(leaves)
        runs = [np.asarray(leaf, np.float32).reshape(-1) for leaf in leaves]
        return self.encode_flat(np.concatenate(runs) if runs else np.zeros(0, np.float32))

    def decode(self, arrays: Arrays, like: Sequence[Any]) -> list[np.ndarray]:
        """Return the leaves, with the shapes and dtypes of `like`."""
        if self.decode_flat is None:
            return list(arrays)
        sizes = [int(np.prod(np.shape(leaf))) for leaf in like]
        flat = self.decode_flat(arrays, sum(sizes))
        runs = np.split(flat, np.cumsum(sizes)[:-1])
        return [
            run.reshape(np.shape(leaf)).astype(leaf.dtype, copy=False)
            for run, leaf in zip(runs, like, strict=True)
        ]


def make_codec(compress: Compression) -> Codec:
    """Return the codec of a config."""
    match compress:
        case BFloat16():
            return Codec(
                lambda flat: [flat.astype(ml_dtypes.bfloat16)],
                lambda arrays, size: arrays[0].astype(np.float32),
            )
        case Int8(block=block):
            return _levels(127, block, packed=False)
        case Int4(block=block):
            return _levels(7, block, packed=True)
        case E3M0(block=block):
            return _powers(block)
        case TopK(share=share):
            return _top_k(share)
    return Codec()


def _levels(levels: int, block: int, *, packed: bool) -> Codec:
    """Return the codec of multiples of a block's largest magnitude / `levels`, rounded."""

    def encode(flat: np.ndarray) -> list[np.ndarray]:
        units, scales = _normalize(_blocks(flat, block))
        codes = np.rint(units * levels).astype(np.int8).reshape(-1)[: flat.size]
        scales = scales / np.float32(levels)
        return [_pack(codes + levels + 1) if packed else codes, scales]

    def decode(arrays: Arrays, size: int) -> np.ndarray:
        codes, scales = arrays
        if packed:
            codes = _unpack(codes, size).astype(np.int8) - (levels + 1)
        return (_blocks(codes.astype(np.float32), block) * scales[:, None]).reshape(-1)[:size]

    return Codec(encode, decode)


def _powers(block: int) -> Codec:
    """Return the codec of powers of two, E3M0: code 0 is 0 and code c is scale x 2^(c - 7)."""

    def encode(flat: np.ndarray) -> list[np.ndarray]:
        units, scales = _normalize(_blocks(flat, block))
        sizes = np.abs(units)
        fraction, exponent = np.frexp(sizes)  # fraction in 1/2 .. 1
        nearest = exponent - 1 + (fraction >= 0.75)  # between 2^k and 2^(k + 1), half way up
        codes = np.clip(nearest + 7, 1, 7) * (sizes >= 2**-7)
        signs = (units < 0) * (codes > 0)
        codes = (codes + 8 * signs).astype(np.uint8).reshape(-1)[: flat.size]
        return [_pack(codes), scales]

    def decode(arrays: Arrays, size: int) -> np.ndarray:
        packed, scales = arrays
        powers = np.ldexp(np.float32(1), np.arange(8) - 7)
        powers[0] = 0
        table = np.concatenate([powers, -powers]).astype(np.float32)
        return (_blocks(table[_unpack(packed, size)], block) * scales[:, None]).reshape(-1)[:size]

    return Codec(encode, decode)


def _top_k(share: float) -> Codec:
    """Return the codec that sends the largest magnitudes, with their places; the others are 0."""

    def encode(flat: np.ndarray) -> list[np.ndarray]:
        count = min(flat.size, max(1, round(share * flat.size)))
        if not count:
            return [np.zeros(0, np.uint32), flat]
        places = np.sort(np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :])
        return [places.astype(np.uint32), flat[places]]

    def decode(arrays: Arrays, size: int) -> np.ndarray:
        places, values = arrays
        flat = np.zeros(size, np.float32)
        flat[places] = values
        return flat

    return Codec(encode, decode)


def _blocks(flat: np.ndarray, block: int) -> np.ndarray:
    """Return rows of `block` numbers, the last one filled up with zeros."""
    padded = np.zeros(-(-flat.size // block) * block, flat.dtype)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def _normalize(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return block / max|block|, and max|block|; a non-finite block gives zeros and NaN."""
    scales = np.abs(blocks).max(axis=1, initial=0)
    finite = np.isfinite(scales)
    scales = np.where(finite, scales, np.float32(np.nan)).astype(np.float32)
    usable = finite & (scales > 0)
    divisors = np.where(usable, scales, np.float32(1))[:, None]
    units = np.where(usable[:, None], blocks, np.float32(0)) / divisors
    return units.astype(np.float32, copy=False), scales


def _pack(codes: np.ndarray) -> np.ndarray:
    """Return two codes of four bits a byte, the first one low."""
    even = np.zeros(codes.size + codes.size % 2, np.uint8)
    even[: codes.size] = codes
    return even[0::2] | (even[1::2] << 4)


def _unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Return codes of four bits."""
    codes = np.empty(2 * packed.size, np.uint8)
    codes[0::2], codes[1::2] = packed & 15, packed >> 4
    return codes[:size]


class Encoded(NamedTuple):
    """The push of a part."""

    arrays: list[np.ndarray]
    """What is sent."""
    sent: list[np.ndarray]
    """The leaves that the server will read."""
    left: list[np.ndarray]
    """What was not sent of each leaf; empty without feedback."""


class PushEncoder:
    """Encoder of a worker's pushes, with what earlier ones have not sent."""

    def __init__(self, codec: Codec, partition: Partition, *, feedback: bool):
        self._codec, self._partition, self._feedback = codec, partition, feedback
        self._residual: dict[int, list[np.ndarray]] = {}

    def encode(self, part: int, leaves: Sequence[Any]) -> Encoded:
        """Return the push of the leaves of a part; the residual is as before until `keep`."""
        wanted = [np.asarray(leaf) for leaf in leaves]
        if self._feedback:
            wanted = [leaf.astype(np.float32, copy=False) for leaf in wanted]
        if part in self._residual:
            wanted = [x + rest for x, rest in zip(wanted, self._residual[part], strict=True)]
        arrays = self._codec.encode(wanted)
        sent = self._codec.decode(arrays, wanted)
        if not self._feedback:
            return Encoded(arrays, sent, [])
        return Encoded(arrays, sent, [x - read for x, read in zip(wanted, sent, strict=True)])

    def keep(self, part: int, pushed: Encoded) -> None:
        """Keep what a push has left, for the next one of the part."""
        if self._feedback:
            self._residual[part] = pushed.left

    def load(self, residual: Any) -> None:
        """Replace the residual by a tree of the parameters' structure; (): zeros."""
        parts = range(len(self._partition.shards)) if self._feedback and residual != () else ()
        of = self._partition.of_params
        self._residual = {part: jax.tree.leaves(of(residual, part)) for part in parts}

    def residual(self, like: Params) -> Any:
        """Return the residual as a tree; () if none is kept."""
        if not self._feedback:
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

    version: str
    """Version of the parameters that the worker has afterwards."""
    kind: Literal["nothing", "change", "all"]
    arrays: Arrays


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
        self._version, self._before = secrets.token_hex(8), ""
        self._change: list[np.ndarray] = []

    def publish(self, params: Arrays, published: Arrays) -> list[np.ndarray]:
        """Encode what has changed, and return what workers have with it."""
        wide = [np.asarray(leaf, np.float32) for leaf in params]
        change = [
            new - np.asarray(old, np.float32) for new, old in zip(wide, published, strict=True)
        ]
        self._version, self._before = secrets.token_hex(8), self._version
        self._change = self._codec.encode(change)
        return add_change(self._codec, self._change, published)

    def answer(self, known: str, published: Arrays) -> Published:
        """Return what a worker with the version `known` lacks."""
        if known == self._version:
            return Published(self._version, "nothing", [])
        if known == self._before:
            return Published(self._version, "change", self._change)
        return Published(self._version, "all", list(published))


class Subscriber:
    """Worker's side: the parts that it has."""

    def __init__(self, codec: Codec):
        self._codec = codec
        self._parts: dict[int, tuple[str, list[np.ndarray]]] = {}

    def known(self, part: int) -> str:
        """Return the version of a part."""
        return self._parts[part][0] if part in self._parts else "none"

    def take(self, part: int, reply: Published) -> list[np.ndarray]:
        """Return the leaves of a part, with a reply to a pull in them."""
        whole = reply.kind == "all"
        leaves = [np.array(leaf) for leaf in reply.arrays] if whole else self._parts[part][1]
        if reply.kind == "change":
            leaves = add_change(self._codec, reply.arrays, leaves)
        self._parts[part] = reply.version, leaves
        return leaves


def add_change(codec: Codec, change: Arrays, leaves: Sequence[Any]) -> list[np.ndarray]:
    """Return leaves with an encoded change added, the same bits for servers and workers."""
    read = codec.decode(change, leaves)
    return [np.asarray(leaf) + each for leaf, each in zip(leaves, read, strict=True)]
