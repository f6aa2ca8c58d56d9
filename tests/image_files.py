"""Files of images as the tests write them: tiny, and in the format of the real sets."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from jtrain.data import known_sets
from jtrain.data.images.image_dataset import FILES
from jtrain.data.known_sets import DIGITS

CODES = {"|u1": 8, "|i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def alone_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are looked for in `folder` alone, whatever is installed on the machine."""
    monkeypatch.setenv("JTRAIN_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(known_sets, "FASHION_MNIST", None)
    monkeypatch.setattr(known_sets, "package_folder", lambda *_: None)


def idx_bytes(array: np.ndarray) -> bytes:
    """An array as an idx file has it, written from the format's description."""
    array = array.astype(array.dtype.newbyteorder(">"))
    head = bytes([0, 0, CODES[array.dtype.str], array.ndim])
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    """The path, where the array lies now; packed if it ends in `.gz`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = idx_bytes(array)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_fashion_mnist(folder: Path, *, train: int = 40, test: int = 20, suffix: str = "") -> Path:
    """The folder of a set of the name and format of Fashion-MNIST: bands that tell the class."""
    for first, rows in ((0, train), (2, test)):
        label = np.arange(rows, dtype=np.uint8) % 10
        image = np.random.default_rng(rows).integers(0, 60, (rows, 28, 28), np.uint8)
        for row, band in enumerate(label):
            image[row, 2 * band : 2 * band + 4] += 150
        write_idx(folder / (FILES[first] + suffix), image)
        write_idx(folder / (FILES[first + 1] + suffix), label)
    return folder


def write_digits(folder: Path, *, rows: int = 60) -> Path:
    """The folder of a file of the name and format of scikit-learn's digits."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(rows)
    table = np.concatenate([rng.integers(0, 6, (rows, 64)), np.arange(rows)[:, None] % 10], axis=1)
    for row in table:
        row[4 * row[-1] : 4 * row[-1] + 8] += 10
    lines = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    (folder / f"{DIGITS}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """The checksum that TFRecord writes of these bytes."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(record: bytes) -> bytes:
    """A record as a TFRecord file has it."""
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def write_records(path: Path, records: list[bytes]) -> Path:
    """The path of a TFRecord file, written from the format's description."""
    path.write_bytes(b"".join(map(framed, records)))
    return path


def write_image_folder(folder: Path, *, classes: int, each: int, side: int = 9) -> Path:
    """A folder of PNG files by class, of several shapes: a band of light that tells the class."""
    from PIL import Image

    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        for row in range(each):
            draw = np.random.default_rng(100 * label + row)
            image = draw.integers(0, 90, (side + row % 3, side + row % 2, 3), np.uint8)
            image[2 * label : 2 * label + 2] += 150
            Image.fromarray(image).save(folder / f"class{label}" / f"{row}.png")
    return folder
