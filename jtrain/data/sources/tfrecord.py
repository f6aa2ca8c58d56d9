"""Records of TFRecord files by index; no TensorFlow is needed."""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.sources.crc32c import crc32c
from jtrain.data.sources.files import found
from jtrain.data.sources.records import Damaged, Records
from jtrain.errors import DataError

HEAD, TAIL = 12, 4  # a length and its checksum; the checksum of the data
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8  # CRC-32C, bits reversed; what TFRecord adds to it


class TFRecords(Records):
    """The records (bytes) of TFRecord files, one file after the other: `len`, and by index.

    Grain can only stream these files. Here their lengths are walked through once when they are
    opened (1.5 us a record where the file lies in memory, measured) and the data is mapped, so
    that any record is read where it lies and a batch stays a function of the step:

    ```python
    rows = grain.MapDataset.source(TFRecords("train-*.tfrecord")).map(read_example)
    source = GrainRows(rows)
    ```

    The checksum of every length is verified when a file is opened, so that what is cut off or
    foreign is noticed at once; that of the data when a record is read (5 us a kB). Files packed by
    gzip have no places to go to.

    Args:
        paths: files, a pattern, or a list of them.
        damaged: what becomes of a record whose data is not what was written; see `Records`.

    Raises:
        DataError: a file that is cut off, foreign or packed, by its name and byte; or no record.
            When it is read, a record that is damaged.

    Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = found(paths)
        self._files = [_mapped(path) for path in self.paths]
        # Of each file, n 2: where the data begins, and its length.
        self._places = [_walked(*file) for file in zip(self.paths, self._files, strict=True)]
        super().__init__(paths, map(len, self._places), damaged)

    def __getstate__(self) -> dict[str, Any]:
        """All but the mappings, which another process makes anew."""
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._files = [_mapped(path) for path in self.paths]

    def _read(self, file: int, within: int) -> bytes:
        begin, length = self._places[file][within].tolist()
        end = begin + length
        data, said = self._files[file][begin:end], self._files[file][end : end + TAIL]
        if _masked(crc32c(data)) != int.from_bytes(said, "little"):
            raise DataError(
                f"{self.paths[file]}: record {within}, at byte {begin - HEAD}, has data whose "
                f"checksum is another: it is damaged. Get the file again, or leave such records "
                f"out: TFRecords(..., damaged='skip')."
            )
        return data


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        size = path.stat().st_size  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _walked(path: Path, data: mmap.mmap | bytes) -> np.ndarray:  # int64, n 2
    """Where each record's data begins, and its length."""
    if data[:2] == b"\x1f\x8b":
        raise DataError(
            f"{path} is packed by gzip, at byte 0, and records are read where they lie. "
            f"Unpack it: gunzip -k {path}"
        )
    places, sums, at, end = list[tuple[int, int]](), list[int](), 0, len(data)
    unpack = struct.Struct("<QI").unpack_from
    while at + HEAD <= end:
        length, checksum = unpack(data, at)
        places.append((at + HEAD, length))
        sums.append(checksum)
        at += HEAD + length + TAIL
        if at > end:
            break
    found_at = np.array(places, np.uint64).reshape(-1, 2)
    wrong = np.flatnonzero(_masked_crc(found_at[:, 1]) != np.array(sums, np.uint32))
    if len(wrong):
        record = int(wrong[0])
        raise DataError(
            f"{path} was to be a TFRecord file; record {record}, at byte "
            f"{places[record][0] - HEAD}, begins with a length whose checksum is another. "
            f"It is damaged or another file: get it again."
        )
    if at != end:
        raise DataError(
            f"{path} was to end with a whole record; its last, record {len(places) - (at > end)}, "
            f"is cut off at byte {end}. Get it again, or cut it: truncate -s "
            f"{places[-1][0] - HEAD if at > end else at} {path}"
        )
    return found_at.astype(np.int64)


def _masked_crc(lengths: np.ndarray) -> np.ndarray:  # uint64, n -> uint32, n
    """The checksum that TFRecord writes of each length: CRC-32C, turned and shifted."""
    crc = np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(lengths.astype("<u8")).view(np.uint8).reshape(-1, 8).T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    turned = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return turned + np.uint32(_MASK)


def _masked(crc: int) -> int:
    """The same of a checksum that is known."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _table() -> np.ndarray:  # uint32, 256
    """The CRC-32C of each byte alone."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _table()
