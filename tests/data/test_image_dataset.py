"""Sets of images: known ones and where they are searched, folders by class, held-out shares."""

import gzip
import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close
from image_files import alone_here, idx_bytes, write_fashion_mnist, write_idx, write_image_folder
from PIL import Image, ImageOps

from experiments.mnist1d import MNIST1D
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.images.image_dataset import FILES, read_idx
from jtrain.data.images.image_folder import ImageFolder
from jtrain.data.known_sets import FashionMnist, read_digits
from jtrain.data.sources.arrays import Arrays, hold_out
from jtrain.data.sources.files import cache_dir, find_set
from jtrain.errors import DataError


def all_rows(source) -> dict[str, np.ndarray]:
    return source[np.arange(len(source))]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    alone_here(tmp_path, monkeypatch)
    return tmp_path


def test_fashion_mnist_is_bytes_with_a_channel_and_whole_numbers(data: Path):
    write_fashion_mnist(data / "fashion-mnist")
    built = FashionMnist().build()
    rows = all_rows(built.train)
    assert rows["image"].shape == (40, *built.image) == (40, 28, 28, 1)
    assert rows["image"].dtype == np.uint8
    assert rows["label"].dtype == np.int32
    assert rows["label"].tolist() == [*range(10)] * 4
    assert built.classes == 10
    assert built.validation is built.test
    assert len(built.test) == 20
    held = FashionMnist(validation=0.25).build()  # of training: the test set is whole
    assert (len(held.train), len(held.validation), len(held.test)) == (30, 10, 20)


def test_digits_are_the_numbers_of_their_lines(data: Path):
    (data / "digits.csv").write_text(",".join(["0", "16", "4", *["8"] * 61, "7"]) + "\n")
    rows = all_rows(read_digits(data / "digits.csv"))
    assert rows["label"].tolist() == [7]
    assert rows["image"].ravel()[:4].tolist() == [0.0, 1.0, 0.25, 0.5]


def test_the_held_out_share_is_pinned_and_mixed():
    train, kept = hold_out(Arrays(x=np.arange(1000)), 0.1)
    rows = all_rows(kept)["x"]
    assert rows[:6].tolist() == [12, 20, 31, 38, 60, 68], "what was measured stays comparable"
    assert sorted([*all_rows(train)["x"], *rows]) == list(range(1000))
    per_hundred = np.bincount(rows // 100, minlength=10)
    assert per_hundred.min() > 3, "from everywhere: sets are often sorted by class"


def test_a_label_out_of_range_is_reported_by_file_and_byte(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[1], np.array([3] * 39 + [10], np.uint8))
    with pytest.raises(DataError, match=r"train-labels.* 0 \.\. 9; label 39, at byte 47, is 10"):
        FashionMnist().build()
    assert (folder / FILES[1]).read_bytes()[47] == 10


IMAGES = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)


@pytest.mark.parametrize(("dtype", "suffix"), [("u1", ".gz"), ("i2", ""), ("f8", ".gz")])
def test_gives_the_array_that_was_written(dtype: str, suffix: str, tmp_path: Path):
    array = (np.arange(24).reshape(4, 3, 2) * 5).astype(dtype)
    got = read_idx(write_idx(tmp_path / f"array{suffix}", array))
    np.testing.assert_array_equal(got, array, strict=True)
    assert got.dtype.isnative


def test_a_file_that_is_cut_off_anywhere_is_refused_with_its_end(tmp_path: Path):
    whole = idx_bytes(IMAGES)
    assert len(whole) == 156
    path = tmp_path / "images"
    for kept in (*range(18), 80, 155):
        path.write_bytes(whole[:kept])
        place = 0 if kept < 4 else kept
        with pytest.raises(DataError, match=rf"{path} .* at byte {place}\b"):
            read_idx(path)


def test_a_packed_file_that_is_cut_off_is_refused_with_its_end(tmp_path: Path):
    packed = gzip.compress(idx_bytes(IMAGES))
    path = tmp_path / "images.gz"
    for place in (0, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:place])
        with pytest.raises(DataError, match=rf"images\.gz .* at byte {place}\b"):
            read_idx(path)


NAMES = ["images", "labels"]


def write_files(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return [folder / name for name in names]


def find(installed: Path) -> list[Path]:
    return find_set("shirts", NAMES, installed, "apt-get install dataset-shirts")


def test_each_folder_is_searched_and_the_users_own_comes_first(data: Path):
    system = data / "system"
    for place in (system, cache_dir() / "shirts", data / "shirts"):
        expected = write_files(place, "images.gz", "labels")
        assert find(system) == expected


def test_files_are_never_taken_from_two_places(data: Path):
    write_files(cache_dir() / "shirts", "images")
    write_files(data / "system", "labels")
    with pytest.raises(DataError, match=r"data/shirts, which lacks labels\n") as caught:
        find(data / "system")
    assert f"{data}/system, which lacks images\n" in str(caught.value)


@pytest.mark.thorough
def test_the_curves_equal_those_of_the_package():
    train, test = MNIST1D().build()
    curves, labels = train.arrays["curve"], train.arrays["label"]
    assert curves.shape == (4000, 40)
    assert curves.dtype == np.float32
    assert len(test) == 1000
    # From mnist1d 0.0.2.post1: make_dataset(get_dataset_args()).
    first = [
        [-0.33200567, -0.47191037, -0.77869708, -1.00974083],
        [1.96548088, 2.30021254, 2.21339278, 1.98917376],
    ]
    assert_close(curves[:2, :4], first, 1e-6)
    last = [0.65987565, 0.87773435, 1.19315184]
    assert_close(test.arrays["curve"][-1, -3:], last, 1e-6)
    assert labels[:10].tolist() == [2, 6, 4, 5, 6, 6, 6, 0, 3, 1]


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


def cut(path: Path) -> None:
    saved(path, Image.fromarray(pixels(64, 64)), quality=90)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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


def test_an_image_that_is_skipped_is_replaced_by_one_on_its_own_side(tmp_path: Path):
    for i in range(40):
        saved(tmp_path / "cat" / f"{i:02}.png", Image.fromarray(np.full((8, 8, 3), i, np.uint8)))
    found = folder(tmp_path, damaged="skip", validation=0.3).build()
    own, other = found.train, found.validation
    broken = next(i for i in own.indices.tolist() if i + 1 in other.indices)
    text(tmp_path / "cat" / f"{broken:02}.png")
    image = own[np.arange(len(own))]["image"]
    assert set(image[:, 0, 0, 0].tolist()) == {*own.indices.tolist()} - {broken}


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
