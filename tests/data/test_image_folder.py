"""Images in folders by class: decoding to one size, and errors."""

import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from image_files import write_image_folder
from PIL import Image, ImageOps

from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.images.image_folder import ImageFolder
from jtrain.errors import DataError

SMALL = {"height": 8, "width": 8}
SIZE = ImageSize(height=8, width=8)


def folder(path: Path, **values):
    return ImageFolder(folder=str(path), **SMALL | values)


def pixels(height: int = 8, width: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def saved(path: Path, image: Image.Image, **how) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


def test_rows_are_the_images_and_the_indices_of_their_classes(tmp_path: Path):
    for number, name in enumerate(["ant", "bee", "cat"]):
        for row in range(4):
            image = Image.fromarray(pixels(seed=10 * number + row))
            saved(tmp_path / name / "more" / f"{row}.PNG", image)
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    built = folder(tmp_path, validation=0.25).build()
    assert (built.image, built.classes) == ((8, 8, 3), 3)
    assert (len(built.train), len(built.validation), len(built.test)) == (9, 3, 3)
    files = built.train.source  # the training rows
    assert len(files) == 12
    rows = files[np.array([11, 0, 5])]
    assert rows["label"].tolist() == [2, 0, 1]
    for got, seed in zip(rows["image"], [23, 0, 11], strict=True):
        np.testing.assert_array_equal(got, pixels(seed=seed))


def test_separate_folders_are_validation_and_test(tmp_path: Path):
    write_image_folder(tmp_path / "train", classes=3, each=4)
    write_image_folder(tmp_path / "val", classes=2, each=2)
    built = folder(tmp_path).build()
    assert (len(built.train), len(built.validation), len(built.test)) == (12, 4, 4)
    write_image_folder(tmp_path / "test", classes=3, each=1)
    assert [len(rows) for rows in folder(tmp_path).build()[:3]] == [12, 4, 3]


@pytest.mark.parametrize(("fit", "channels"), [("crop", 3), ("pad", 1), ("squash", 3)])
def test_every_image_is_resized_as_by_pillow(tmp_path: Path, fit: str, channels: int):
    image = Image.fromarray(pixels(30, 50))
    path = saved(tmp_path / "a.png", image)
    got = decode_image(path, ImageSize(height=12, width=8, channels=channels, fit=fit))
    image = image.convert("L" if channels == 1 else "RGB")
    how = {"crop": ImageOps.fit, "pad": ImageOps.pad}.get(fit, Image.Image.resize)
    expected = how(image, (8, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(got, np.asarray(expected).reshape(12, 8, channels))
    assert got.shape == (12, 8, channels)


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "CMYK"])
def test_every_mode_of_8_bits_becomes_colours(tmp_path: Path, mode: str):
    image = Image.fromarray(pixels()).convert(mode)
    path = saved(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), image)
    with Image.open(path) as found:
        assert found.mode == mode
        expected = np.asarray(found.convert("RGB"))
    np.testing.assert_array_equal(decode_image(path, SIZE), expected)


def test_a_photograph_is_turned_upright(tmp_path: Path):
    image = Image.fromarray(pixels(8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    path = saved(tmp_path / "a.png", image, exif=exif)
    np.testing.assert_array_equal(decode_image(path, SIZE), np.rot90(np.asarray(image), -1))


# Files that cannot be decoded


def jpeg(path: Path) -> Path:
    return saved(path, Image.fromarray(pixels(64, 64)), quality=90)


def cut(path: Path) -> None:
    jpeg(path).write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def text(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<!DOCTYPE html>")


def bomb(path: Path, side: int = 60_000) -> None:
    """Write a PNG of a few kB that claims 3.6 billion pixels."""
    chunk = lambda kind, data: (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


BROKEN = {
    cut: r"should be a complete image and is not .* data.damaged=skip",
    text: r"is not: it begins with b'<!DOCTYP'\. Remove it",
    bomb: r"at most 67,108,864 pixels and has more than 89,478,485 pixels; a small file can claim",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_file_that_cannot_be_decoded_is_reported_by_name(tmp_path: Path, make):
    path = tmp_path / "a.jpg"
    make(path)
    with pytest.raises(DataError, match=BROKEN[make]) as caught:
        decode_image(path, SIZE)
    assert str(caught.value).startswith(str(path))


def test_damaged_files_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_image_folder(tmp_path, classes=2, each=3)
    broken = sorted((tmp_path / "class0").iterdir())
    for path in broken[1:]:
        cut(path)
    with pytest.raises(DataError, match=r"data\.damaged=skip"):
        folder(tmp_path, validation=0.2).build().train.source[np.arange(6)]
    files = folder(tmp_path, validation=0.2, damaged="skip").build().train.source
    with caplog.at_level(logging.WARNING, "jtrain.data.images.image_folder"):
        rows = files[np.arange(6)]
        files[np.arange(6)]
    assert rows["label"].tolist() == [0, 1, 1, 1, 1, 1], "the next valid image, with its label"
    assert len(caplog.records) == 2, "each is told once"
    for path in tmp_path.rglob("*.*"):
        cut(path)
    files = folder(tmp_path, validation=0.2, damaged="skip").build().train.source
    with pytest.raises(DataError, match="None of the 6 images"):
        files[np.arange(2)]


# Incomplete folders


def test_an_image_that_is_skipped_is_replaced_by_one_on_its_own_side(tmp_path: Path):
    for i in range(40):
        saved(tmp_path / "cat" / f"{i:02}.png", Image.fromarray(np.full((8, 8, 3), i, np.uint8)))
    found = folder(tmp_path, damaged="skip", validation=0.3).build()
    own, other = found.train, found.validation
    broken = next(i for i in own.indices.tolist() if i + 1 in other.indices)
    text(tmp_path / "cat" / f"{broken:02}.png")
    image = own[np.arange(len(own))]["image"]
    assert set(image[:, 0, 0, 0].tolist()) == {*own.indices.tolist()} - {broken}


def test_no_validation_images_are_reported_with_working_advice(tmp_path: Path):
    write_image_folder(tmp_path / "train", classes=2, each=4)
    with pytest.raises(DataError, match=r"none to validate on.*data.folder=.*train"):
        folder(tmp_path).build()
    assert len(folder(tmp_path / "train", validation=0.25).build().validation) == 2


def test_the_fingerprint_depends_on_images_sizes_and_classes(tmp_path: Path):
    write_image_folder(tmp_path / "a", classes=2, each=4)
    write_image_folder(tmp_path / "b", classes=2, each=4)
    print_ = lambda path, **values: fingerprint(
        folder(path, validation=0.2, **values).build().train
    )
    one = print_(tmp_path / "a")
    assert one == print_(tmp_path / "b"), "wherever it lies, whenever it was written"
    assert one != print_(tmp_path / "a", height=9)
    (tmp_path / "b" / "class1").rename(tmp_path / "b" / "other")
    assert one != print_(tmp_path / "b")
    saved(tmp_path / "a" / "class0" / "0.png", Image.fromarray(pixels(9, 9, seed=77)))
    assert one != print_(tmp_path / "a")
