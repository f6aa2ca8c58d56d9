"""Arrays of idx files, against the format's description, and damaged files."""

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from image_files import idx_bytes, write_idx

from jtrain.data.sources.idx import read_idx
from jtrain.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
def test_gives_the_array_that_was_written(dtype: str, suffix: str, tmp_path: Path):
    array = (np.arange(24).reshape(4, 3, 2) * 5).astype(dtype)
    got = read_idx(write_idx(tmp_path / f"array{suffix}", array))
    np.testing.assert_array_equal(got, array, strict=True)
    assert got.dtype.isnative


def test_a_plain_file_of_bytes_is_mapped_and_not_read(tmp_path: Path):
    got = read_idx(write_idx(tmp_path / "images", IMAGES))
    assert isinstance(got, np.memmap)
    assert not got.flags.writeable


def test_a_packed_file_is_held_in_memory_once(tmp_path: Path):
    path = write_idx(tmp_path / "images.gz", np.zeros((5000, 40, 40), np.uint8))
    tracemalloc.start()
    got = read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.nbytes == 8_000_000
    assert peak < 1.2 * got.nbytes, "the array and a few blocks of 256 KB"


@pytest.mark.parametrize("shape", [(0,), (0, 28, 28), (3, 0)])
def test_an_array_without_numbers_is_empty_and_no_error(shape: tuple[int, ...], tmp_path: Path):
    assert read_idx(write_idx(tmp_path / "empty", np.zeros(shape, np.uint8))).shape == shape


@pytest.mark.parametrize("kept", [*range(16), 16, 17, 80, 155])
def test_a_file_that_is_cut_off_anywhere_is_refused_with_its_end(kept: int, tmp_path: Path):
    whole = idx_bytes(IMAGES)
    assert len(whole) == 156
    path = tmp_path / "images"
    path.write_bytes(whole[:kept])
    place = 0 if kept < 4 else kept
    with pytest.raises(DataError, match=rf"{path} .* at byte {place}\b"):
        read_idx(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_packed_file_that_is_cut_off_is_refused_with_its_end(share: float, tmp_path: Path):
    packed = gzip.compress(idx_bytes(IMAGES))
    path = tmp_path / "images.gz"
    path.write_bytes(packed[: int(len(packed) * share)])
    place = int(len(packed) * share)
    with pytest.raises(DataError, match=rf"images\.gz .* at byte {place}\b"):
        read_idx(path)


def test_every_flipped_bit_of_a_packed_file_is_noticed_or_harmless(tmp_path: Path):
    packed = gzip.compress(idx_bytes(IMAGES))
    path, noticed = tmp_path / "images.gz", 0
    for place in range(len(packed)):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 4]) + packed[place + 1 :])
        try:
            np.testing.assert_array_equal(read_idx(path), IMAGES)
        except DataError:
            noticed += 1
    assert noticed > 0.95 * len(packed), "all but gzip's notes on time and system"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_with_more_data_behind_its_end_is_refused(suffix: str, tmp_path: Path):
    data = idx_bytes(IMAGES) + b"\0"
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(DataError, match="up to byte 156 and continues behind it"):
        read_idx(path)


def test_impossible_sizes_are_refused_before_memory_is_allocated(tmp_path: Path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12))
    with pytest.raises(DataError, match=r"at byte 4 .* 4294967295 x 4294967295 x 4294967295"):
        read_idx(path)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"<html>not found</html>", b"\0\0\x07\x01"])
def test_a_foreign_file_is_refused_with_what_it_begins_with(data: bytes, tmp_path: Path):
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"at byte 0 it has {data[:4].hex(' ')}"):
        read_idx(path)


def test_a_plain_file_named_gz_is_reported(tmp_path: Path):
    path = tmp_path / "images.gz"
    path.write_bytes(idx_bytes(IMAGES))
    with pytest.raises(DataError, match=r"take \.gz off its name"):
        read_idx(path)
    read_idx(path.rename(tmp_path / "images"))
