"""The CRC-32C of bytes by numpy, over all blocks at once."""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bits reversed
_BLOCK = 512  # bytes, which need half a MiB of tables
_AT_ONCE = 64 * _BLOCK
_PLACES = np.arange(_BLOCK - 1, -1, -1, dtype=np.intp) * 256


def crc32c(data: bytes) -> int:
    """Return the checksum of RFC 3720, appendix B.4, that TFRecord and others use.

    The checksum is the exclusive or of one term for each byte and place. So the terms of all blocks
    are looked up at once, and the blocks are then combined one after the other.
    """
    tables, numbers, crc = _tables(), np.frombuffer(data, np.uint8), 0xFFFFFFFF
    short = len(numbers) % _BLOCK
    for byte in data[: short % 4]:
        crc = (crc >> 8) ^ int(tables[0, (crc ^ byte) & 0xFF])
    if short >= 4:
        crc = _combine(tables, crc, numbers[short % 4 : short].reshape(1, -1))
    for begin in range(short, len(numbers), _AT_ONCE):
        crc = _combine(tables, crc, numbers[begin : begin + _AT_ONCE].reshape(-1, _BLOCK))
    return crc ^ 0xFFFFFFFF


def _combine(tables: np.ndarray, crc: int, blocks: np.ndarray) -> int:  # blocks: n size
    """Return the checksum `crc` continued over the blocks."""
    size = blocks.shape[1]
    places = _PLACES[-size:]
    separate = np.bitwise_xor.reduce(tables.ravel().take(blocks + places[None]), axis=1)
    a, b, c, d = (tables[size - 1 - i] for i in range(4))
    for own in separate.tolist():  # the previous checksum enters the first four bytes
        previous = a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]
        crc = own ^ int(previous)
    return crc


@functools.cache
def byte_table() -> np.ndarray:  # uint32, 256
    """Return the CRC-32C of each single byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


@functools.cache
def _tables() -> np.ndarray:  # uint32, block 256
    """Return the term of each byte, by the number of bytes that follow in its block."""
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = byte_table()
    for place in range(1, _BLOCK):
        before = tables[place - 1]
        tables[place] = (before >> np.uint32(8)) ^ tables[0][before & 0xFF]
    return tables
