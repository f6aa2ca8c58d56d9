"""The CRC-32C of bytes, by numpy: all blocks of them at once."""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bits reversed
_BLOCK = 512  # bytes, for which half a MiB of tables is held
_AT_ONCE = 64 * _BLOCK
_PLACES = np.arange(_BLOCK - 1, -1, -1, dtype=np.intp) * 256


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, appendix B.4, that TFRecord and others use.

    It is a sum (exclusive or) of what each byte alone gives at its place: so the blocks' are looked
    up at once, and are then put together one after the other, each after what came before.
    """
    tables, numbers, crc = _tables(), np.frombuffer(data, np.uint8), 0xFFFFFFFF
    short = len(numbers) % _BLOCK
    for byte in data[: short % 4]:
        crc = (crc >> 8) ^ int(tables[0, (crc ^ byte) & 0xFF])
    if short >= 4:
        crc = _put_together(tables, crc, numbers[short % 4 : short].reshape(1, -1))
    for begin in range(short, len(numbers), _AT_ONCE):
        crc = _put_together(tables, crc, numbers[begin : begin + _AT_ONCE].reshape(-1, _BLOCK))
    return crc ^ 0xFFFFFFFF


def _put_together(tables: np.ndarray, crc: int, blocks: np.ndarray) -> int:  # blocks: n size
    """What `crc` becomes over the blocks."""
    size = blocks.shape[1]
    places = _PLACES[-size:]
    alone = np.bitwise_xor.reduce(tables.ravel().take(blocks + places[None]), axis=1)
    a, b, c, d = (tables[size - 1 - i] for i in range(4))
    for own in alone.tolist():  # what came before is added to the first four bytes
        later = a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]
        crc = own ^ int(later)
    return crc


@functools.cache
def _tables() -> np.ndarray:  # uint32, block 256
    """What each byte gives that so many bytes follow in its block."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), first >> 1)
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = first
    for place in range(1, _BLOCK):
        before = tables[place - 1]
        tables[place] = (before >> np.uint32(8)) ^ tables[0][before & 0xFF]
    return tables
