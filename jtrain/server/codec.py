"""Codecs of pushes: arrays of few bytes for the leaves of a gradient, and back.

The leaves of a part are one run of float32 numbers, cut into blocks. A number that is not finite
makes its whole block NaN, so that it is not hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from jtrain.parallel.strategies.server_modes import (
    E3M0,
    BFloat16,
    Compression,
    Int4,
    Int8,
    TopK,
)

Arrays = Sequence[np.ndarray]


class FlatCodec(NamedTuple):
    """Codec of one run of float32 numbers."""

    encode_flat: Callable[[np.ndarray], list[np.ndarray]]
    """Returns the arrays to send."""
    decode_flat: Callable[[Arrays, int], np.ndarray]
    """Returns so many numbers."""

    def encode(self, leaves: Arrays) -> list[np.ndarray]:
        """Return the arrays to send."""
        runs = [np.asarray(leaf, np.float32).reshape(-1) for leaf in leaves]
        return self.encode_flat(np.concatenate(runs) if runs else np.zeros(0, np.float32))

    def decode(self, arrays: Arrays, like: Sequence[Any]) -> list[np.ndarray]:
        """Return the leaves, with the shapes and dtypes of `like`."""
        sizes = [int(np.prod(np.shape(leaf))) for leaf in like]
        flat = self.decode_flat(arrays, sum(sizes))
        runs = np.split(flat, np.cumsum(sizes)[:-1])
        return [
            run.reshape(np.shape(leaf)).astype(leaf.dtype, copy=False)
            for run, leaf in zip(runs, like, strict=True)
        ]


class PlainCodec:
    """The leaves as they are."""

    def encode(self, leaves: Arrays) -> list[np.ndarray]:
        """Return the leaves."""
        return list(leaves)

    def decode(self, arrays: Arrays, like: Sequence[Any]) -> list[np.ndarray]:
        """Return the leaves."""
        del like
        return list(arrays)


Codec: TypeAlias = FlatCodec | PlainCodec


def make_codec(compress: Compression) -> Codec:
    """Return the codec of a config."""
    match compress:
        case BFloat16():
            return FlatCodec(
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
    return PlainCodec()


def _levels(levels: int, block: int, *, packed: bool) -> FlatCodec:
    """Return whole multiples of a block's largest magnitude / `levels`, rounded to the nearest."""

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

    return FlatCodec(encode, decode)


def _powers(block: int) -> FlatCodec:
    """Return powers of two: E3M0, of which code 0 is 0 and code c is scale x 2^(c - 7)."""

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

    return FlatCodec(encode, decode)


def _top_k(share: float) -> FlatCodec:
    """Return the largest magnitudes, with their places from the first on; 0 where none was sent."""

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

    return FlatCodec(encode, decode)


def _blocks(flat: np.ndarray, block: int) -> np.ndarray:
    """Return rows of `block` numbers, the last one filled up with zeros."""
    padded = np.zeros(-(-flat.size // block) * block, flat.dtype)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def _normalize(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks by their largest magnitudes, and those; NaN with zeros if not finite."""
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
