"""A PNG file holds the given pixels, read by an independent reader."""

import struct
import zlib

import numpy as np
import pytest

from jtrain.errors import DataError
from jtrain.io.png import encode_png, tile_images


def chunks(data: bytes) -> dict[bytes, bytes]:
    """Return the chunks of a PNG file, each with a valid checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            kind + body
        )
        found[kind], at = body, at + 12 + size
    return found


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_pixels_are_those_that_were_given(channels: int):
    image = np.random.default_rng(0).integers(256, size=(5, 7, channels), dtype=np.uint8)
    found = chunks(encode_png(image))
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    wide, high, depth, colours, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert (wide, high, depth, rest) == (7, 5, 8, [0, 0, 0])
    assert colours == {1: 0, 3: 2, 4: 6}[channels]
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(5, 1 + 7 * channels)
    assert not rows[:, 0].any()  # no filter
    np.testing.assert_array_equal(rows[:, 1:].reshape(image.shape), image)


def test_a_grid_has_each_image_in_its_place():
    images = np.arange(1, 6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8)
    picture = tile_images(images)
    assert picture.shape == (2 * 3 - 1, 3 * 4 - 1, 1)
    found = [[picture[y, x, 0] for x in (0, 4, 8)] for y in (0, 3)]
    assert found == [[1, 2, 3], [4, 5, 64]]
    assert (picture[2] == 64).all()
    assert tile_images(images, columns=1).shape == (5 * 3 - 1, 3, 1)


def test_numbers_that_are_no_bytes_are_brought_into_their_range():
    image = np.float32([[-3, 0.4], [300, np.nan]])
    rows = np.frombuffer(zlib.decompress(chunks(encode_png(image))[b"IDAT"]), np.uint8).reshape(
        2, 3
    )
    assert rows[:, 1:].tolist() == [[0, 0], [255, 0]]


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (0, 4, 1), (1, 2, 2, 1)])
def test_an_array_that_is_no_image_is_refused(shape):
    with pytest.raises(DataError, match=r"h w c with 1, 3 or 4 channels"):
        encode_png(np.zeros(shape, np.uint8))


def test_arrays_that_are_no_images_are_refused():
    with pytest.raises(DataError, match=r"b h w c, and this one is \[2, 2, 3\]"):
        tile_images(np.zeros((2, 2, 3), np.uint8))
