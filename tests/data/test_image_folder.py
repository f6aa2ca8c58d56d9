"""Images in folders by class: decoding to one size, and errors."""

import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from image_files import write_image_folder
from PIL import Image, ImageOps, PngImagePlugin

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


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_is_resized_as_by_pillow(tmp_path: Path, fit: str, channels: int):
    image = Image.fromarray(pixels(30, 50))
    path = saved(tmp_path / "a.png", image)
    got = decode_image(path, ImageSize(height=12, width=8, channels=channels, fit=fit))
    image = image.convert("L" if channels == 1 else "RGB")
    how = {"crop": ImageOps.fit, "pad": ImageOps.pad}.get(fit, Image.Image.resize)
    expected = how(image, (8, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(got, np.asarray(expected).reshape(12, 8, channels))
    assert got.shape == (12, 8, channels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_of_8_bits_becomes_colours(tmp_path: Path, mode: str):
    image = Image.fromarray(pixels()).convert(mode)
    path = saved(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), image)
    with Image.open(path) as found:
        assert found.mode == mode
        expected = np.asarray(found.convert("RGB"))
    np.testing.assert_array_equal(decode_image(path, SIZE), expected)


def test_a_palette_with_transparency_warns_of_nothing(tmp_path: Path):
    image = Image.fromarray(pixels()).convert("P")
    path = saved(tmp_path / "a.png", image, transparency=bytes(range(200)))
    assert decode_image(path, SIZE).shape == (8, 8, 3)


def _texts(add) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    add(info)
    return info


@pytest.mark.parametrize(
    "options",
    [
        {"pnginfo": _texts(lambda info: info.add_text("prompt", "x" * 2_000_000, zip=True))},
        {"pnginfo": _texts(lambda info: info.add_itxt("a", "x" * 2_000_000, zip=True))},
        {"pnginfo": _texts(lambda info: None), "icc_profile": b"0" * 2_000_000},
    ],
    ids=["zTXt", "iTXt", "iCCP"],
)
def test_a_png_with_much_text_is_whole(tmp_path: Path, options: dict):
    path = saved(tmp_path / "a.png", Image.fromarray(pixels()), **options)
    np.testing.assert_array_equal(decode_image(path, SIZE), np.rot90(pixels(), -1))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"IDAT") + 20])
    with pytest.raises(DataError, match="cut off or damaged"):
        decode_image(path, SIZE)


def test_a_photograph_is_turned_upright(tmp_path: Path):
    image = Image.fromarray(pixels(8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    path = saved(tmp_path / "a.png", image, exif=exif)
    np.testing.assert_array_equal(decode_image(path, SIZE), np.rot90(np.asarray(image), -1))


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(tmp_path: Path):
    smooth = Image.fromarray(pixels(6, 6)).resize((800, 800), Image.Resampling.BICUBIC)
    path = saved(tmp_path / "a.jpg", smooth, quality=95)
    got = decode_image(path, ImageSize(height=32, width=32)).astype(int)
    expected = np.asarray(smooth.resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(got - expected).max() <= 12, "a JPEG's own loss; another image differs by 255"


# Files that cannot be decoded


def jpeg(path: Path) -> Path:
    return saved(path, Image.fromarray(pixels(64, 64)), quality=90)


def cut(path: Path) -> None:
    jpeg(path).write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scratched(path: Path) -> None:
    data = bytearray(saved(path, Image.fromarray(pixels(64, 64)), format="PNG").read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def text(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<!DOCTYPE html>")


def empty(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def gif(path: Path) -> None:
    saved(path, Image.fromarray(pixels()), format="GIF")


def sixteen_bits(path: Path) -> None:
    saved(path, Image.fromarray(np.full((8, 8), 40_000, np.uint16)), format="PNG")


def bomb(path: Path, side: int = 60_000, bits: int = 8) -> None:
    """Write a PNG of a few kB that claims 3.6 billion pixels."""
    chunk = lambda kind, data: (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", side, side, bits, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def sixteen_bits_a_colour(path: Path) -> None:
    bomb(path, 8, bits=16)


def large(path: Path) -> None:
    bomb(path, 9_000)  # 81 million: below Pillow's own warning


BROKEN = {
    cut: r"should be a complete image and is not .* data.damaged=skip",
    scratched: r"should be a complete image and is not",
    text: r"is not: it begins with b'<!DOCTYP'\. Remove it",
    empty: r"is not: it is empty",
    gif: r"is not: it begins with b'GIF",
    sixteen_bits: r"at most 8 bits a channel and has Pillow's mode I;16",
    sixteen_bits_a_colour: r"at most 8 bits a channel and has Pillow's mode RGB;16B",
    bomb: r"at most 67,108,864 pixels and has more than 89,478,485 pixels; a small file can claim",
    large: r"at most 67,108,864 pixels and has 9000 x 9000 = 81,000,000 pixels",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_file_that_cannot_be_decoded_is_reported_by_name(tmp_path: Path, make):
    path = tmp_path / "a.jpg"
    make(path)
    with pytest.raises(DataError, match=BROKEN[make]) as caught:
        decode_image(path, SIZE)
    assert str(caught.value).startswith(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_reported(tmp_path: Path):
    path = jpeg(tmp_path / "a" / "a.jpg")
    path.chmod(0)
    with pytest.raises(DataError, match=r"cannot be \(Permission denied\).*chmod u\+r"):
        decode_image(path, SIZE)


def test_a_missing_file_or_a_folder_is_reported(tmp_path: Path):
    (tmp_path / "folder.jpg").mkdir()
    for name, why in {"gone.jpg": "No such file", "folder.jpg": "is a directory"}.items():
        with pytest.raises(DataError, match=rf"cannot be read \({why}"):
            decode_image(tmp_path / name, SIZE)


def test_the_advice_about_a_large_image_works(tmp_path: Path):
    path = saved(tmp_path / "a.png", Image.fromarray(pixels(40, 40)))
    with pytest.raises(DataError, match=r"has 40 x 40 = 1,600 pixels.*Set data.pixels=89478485"):
        decode_image(path, ImageSize(height=8, width=8, pixels=1000))
    assert decode_image(path, ImageSize(height=8, width=8, pixels=89_478_485)).shape == (8, 8, 3)


def test_damaged_files_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_image_folder(tmp_path, classes=2, each=3)
    broken = sorted((tmp_path / "class0").iterdir())
    for path in broken[1:]:
        cut(path)
    with pytest.raises(DataError, match=r"data\.damaged=skip"):
        folder(tmp_path, validation=0.2).build().train.source[np.arange(6)]
    files = folder(tmp_path, validation=0.2, damaged="skip").build().train.source
    with caplog.at_level(logging.WARNING, "jtrain.data.images.image_files"):
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


@pytest.mark.parametrize("side", ["train", "validation"])
def test_an_image_that_is_skipped_is_replaced_by_one_on_its_own_side(tmp_path: Path, side: str):
    for i in range(40):
        saved(tmp_path / "cat" / f"{i:02}.png", Image.fromarray(np.full((8, 8, 3), i, np.uint8)))
    found = folder(tmp_path, damaged="skip", validation=0.3).build()
    own, other = found.train, found.validation
    own, other = (own, other) if side == "train" else (other, own)
    broken = next(i for i in own.indices.tolist() if i + 1 in other.indices)
    text(tmp_path / "cat" / f"{broken:02}.png")
    image = own[np.arange(len(own))]["image"]
    assert set(image[:, 0, 0, 0].tolist()) == {*own.indices.tolist()} - {broken}


def test_a_missing_folder_is_reported(tmp_path: Path):
    with pytest.raises(DataError, match=r"no folder .*gone.* Set data.folder="):
        folder(tmp_path / "gone").build()


def test_a_folder_without_classes_is_reported(tmp_path: Path):
    jpeg(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"a folder for each class and has none; it holds a\.jpg"):
        folder(tmp_path).build()


def test_a_class_without_images_is_reported(tmp_path: Path):
    jpeg(tmp_path / "ant" / "a.jpg")
    (tmp_path / "bee").mkdir()
    with pytest.raises(DataError, match=r"hold images of the class bee and holds none .*\.jpeg"):
        folder(tmp_path).build()


def test_no_validation_images_are_reported_with_working_advice(tmp_path: Path):
    write_image_folder(tmp_path / "train", classes=2, each=4)
    with pytest.raises(DataError, match=r"none to validate on.*data.folder=.*train"):
        folder(tmp_path).build()
    assert len(folder(tmp_path / "train", validation=0.25).build().validation) == 2


def test_an_unknown_class_in_the_validation_images_is_reported(tmp_path: Path):
    write_image_folder(tmp_path / "train", classes=2, each=2)
    write_image_folder(tmp_path / "val", classes=3, each=2)
    with pytest.raises(DataError, match=r"training classes \(class0, class1\).* class2"):
        folder(tmp_path).build()


def test_a_link_out_of_the_folder_is_reported(tmp_path: Path):
    write_image_folder(tmp_path / "set", classes=2, each=2)
    outside = jpeg(tmp_path / "secret.jpg")
    link = tmp_path / "set" / "class0" / "x.jpg"
    link.symlink_to(outside)
    with pytest.raises(DataError, match=rf"x\.jpg should stay within .*a link to {outside}"):
        folder(tmp_path / "set").build()
    link.unlink()
    link.symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"a link to .*gone\.jpg, which does not exist"):
        folder(tmp_path / "set").build()
    link.unlink()
    link.symlink_to("..")
    with pytest.raises(DataError, match=r"is a link to"):
        folder(tmp_path / "set").build()
    link.unlink()
    link.symlink_to("../class1/0.png")  # within the folder
    assert len(folder(tmp_path / "set", validation=0.2).build().train.source) == 5
    whole = tmp_path / "whole"
    whole.symlink_to(tmp_path / "set")  # the folder itself may be a link
    assert len(folder(whole, validation=0.2).build().train.source) == 5
    (tmp_path / "set" / "class2").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"class2 should stay within"):
        folder(tmp_path / "set").build()


def test_a_missing_pillow_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"needs PIL.*pip install 'jtrain\[images\]'"):
        decode_image(tmp_path / "a.jpg", SIZE)


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
