"""Random windows of image files: the pixels against a sum over the file's, by row and by draw."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageOps

from jtrain.data import Arrays, Shuffled
from jtrain.data.images.augment import Augment
from jtrain.data.images.decode import ImageSize, decode_window
from jtrain.data.images.image_files import ImageFiles
from jtrain.data.images.image_folder import ImageFolder
from jtrain.data.images.windows import WindowDraws
from jtrain.data.sources.subset import Subset
from jtrain.errors import DataError

SIZE = ImageSize(height=12, width=16)
DRAWS = np.random.default_rng(0).random((4, 20))


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image that is smooth, as what a lens draws, with some noise."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (6, 8, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + draw.normal(0, 4, smooth.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def weights(count: int, begin: float, length: float, result: int) -> np.ndarray:
    """Return the weight of each pixel in each of the resized ones (result count): a triangle.

    Its foot is a resized pixel wide on both sides, or a pixel if the window is enlarged.
    """
    scale = length / result
    middle = begin + (np.arange(result)[:, None] + 0.5) * scale
    far = np.abs(np.arange(count) + 0.5 - middle) / max(scale, 1.0)
    found = np.maximum(1 - far, 0)
    return found / found.sum(1, keepdims=True)


def exact_window(image: Image.Image, window: np.ndarray, size: ImageSize) -> np.ndarray:
    """Return a window of a completely decoded image, resized in float64."""
    top, left, high, wide = window.tolist()
    pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"), np.float64)
    down = weights(pixels.shape[0], top, high, size.height)
    right = weights(pixels.shape[1], left, wide, size.width)
    return np.einsum("ih,hwc,jw->ijc", down, pixels, right, optimize=True)


def windows_of(path: Path, size: ImageSize, smallest: float = 0.08) -> tuple[np.ndarray, ...]:
    """Return the windows that are read, and the exact ones."""
    draws = WindowDraws(smallest, DRAWS)
    with Image.open(path) as image:
        width, height = ImageOps.exif_transpose(image).size
        windows = draws.windows(height, width, size.width / size.height)
        exact = np.stack([exact_window(image, window, size) for window in windows])
    got = [decode_window(path, size, draws.row(row)) for row in range(len(windows))]
    return np.stack(got).astype(np.float64), exact


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize(("width", "height"), [(20, 17), (31, 50), (9, 7)])
def test_a_window_is_the_triangle_sum_over_the_pixels_of_the_file(
    tmp_path: Path, suffix: str, width: int, height: int
):
    path = tmp_path / f"a.{suffix}"
    photograph(width, height).save(path)
    got, exact = windows_of(path, SIZE, smallest=0.3)  # so that none is decoded at a half
    # Each of the two passes rounds to a whole number, with weights of 8 bits.
    assert np.abs(got - exact).max() <= 2.5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_windows_at_a_fraction_are_close_to_those_of_a_full_decode(
    tmp_path: Path, orientation: int
):
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph(323, 203).save(path, quality=95, exif=exif)
    got, exact = windows_of(path, SIZE)
    # Noise of 4 levels, of which a mean over 4 x 4 pixels and more is taken, and an edge of the
    # reduced image that is a part of a pixel.
    far = np.abs(got - exact)
    assert far.mean() < 1
    assert far.max() < 8
    beside = np.abs(got - np.roll(exact, 1, axis=2)).mean()
    assert beside > 10 * far.mean(), "a window a pixel beside it is another one"


def test_a_large_file_is_decoded_at_a_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, sizes = tmp_path / "a.jpg", []
    photograph(323, 203).save(path)
    load = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda image, *given, **more: sizes.append(image.size) or load(image, *given, **more),
    )
    whole, small = np.array([[1.0], [0.5], [0], [0]]), np.array([[0.0], [0.5], [0], [0]])
    decode_window(path, SIZE, WindowDraws(0.01, whole))
    decode_window(path, SIZE, WindowDraws(0.01, small))
    assert sizes == [(41, 26), (323, 203)]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "RGBA"])
def test_any_mode_and_the_smallest_image_give_windows(
    tmp_path: Path, mode: str, channels: Literal[1, 3]
):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    size = ImageSize(height=4, width=6, channels=channels)
    for side in (1, 40):
        Image.new("RGB", (side, side), (200, 200, 200)).convert(mode).save(path)
        got = decode_window(path, size, WindowDraws(0.08, DRAWS[:, :1]))
        assert got.shape == (4, 6, channels)
        assert np.abs(got.astype(int) - 200).max() <= 4, "a mode may round"


def folder_of(root: Path, rows: int = 12) -> ImageFiles:
    for row in range(rows):
        photograph(60 + row, 50, seed=row).save(root / f"{row}.jpg")
    label = np.arange(rows, dtype=np.int32)
    return ImageFiles(root, [f"{row}.jpg" for row in range(rows)], label, size=SIZE)


def test_augmented_rows_of_files_depend_on_seed_step_and_row_alone(tmp_path: Path):
    files = folder_of(tmp_path)
    augment = Augment(flip=0.5, zoom=0.08, mixup=0.2)
    build = lambda source, seed=1: augment.build(Shuffled(source, size=6, seed=seed), classes=12)
    batches = build(files)
    batch = batches[5]
    parts = [batches.shard(index, 3)[5] for index in range(3)]
    for name in batch:
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, batch[name], strict=True)
        of_subset = build(Subset(files, np.arange(12)))[5]
        np.testing.assert_array_equal(of_subset[name], batch[name], strict=True)
    assert (build(files, seed=2)[5]["image"] != batch["image"]).any()


def test_a_flipped_window_is_the_mirror_of_the_same_window(tmp_path: Path):
    files = folder_of(tmp_path)
    plain, flipped = (
        Augment(flip=flip, zoom=0.08).build(Shuffled(files, size=6), classes=12)[3]["image"]
        for flip in (0.0, 1.0)
    )
    np.testing.assert_array_equal(flipped, plain[:, :, ::-1], strict=True)


def test_images_in_memory_show_the_same_windows(tmp_path: Path):
    photograph(64, 48).save(tmp_path / "a.png")
    size = ImageSize(height=48, width=64)
    files = ImageFiles(tmp_path, ["a.png"] * 8, np.zeros(8, np.int32), size=size)
    arrays = Arrays(**files[np.arange(8)])
    of_files, of_arrays = (
        Augment(zoom=0.2).build(Shuffled(source, size=8), classes=1)[0]["image"].astype(int)
        for source in (files, arrays)
    )
    far = np.abs(of_files - of_arrays)[:, 2:-2, 2:-2]  # Pillow does not read beyond a window
    assert far.max() <= 2, "each rounds to whole numbers, Pillow twice"


def test_a_damaged_file_is_named_or_skipped_with_the_label_of_the_next(tmp_path: Path):
    files = folder_of(tmp_path)
    path = tmp_path / "3.jpg"
    path.write_bytes(path.read_bytes()[:300])
    draws = WindowDraws(0.08, DRAWS[:, :2])
    with pytest.raises(DataError, match=r"3\.jpg should be a complete image.*data\.damaged=skip"):
        files.read_windows(np.array([2, 3]), draws)
    files.damaged = "skip"
    rows = files.read_windows(np.array([2, 3]), draws)
    assert rows["label"].tolist() == [2, 4]
    next_image = decode_window(tmp_path / "4.jpg", SIZE, draws.row(1))
    np.testing.assert_array_equal(rows["image"][1], next_image, strict=True)


def test_cached_images_are_zoomed_into_as_they_are_cached(tmp_path: Path):
    (tmp_path / "class0").mkdir()
    folder_of(tmp_path / "class0")
    cached = ImageFolder(
        folder=str(tmp_path), height=12, width=16, validation=0.25, cache="memory"
    ).build()
    batches = Shuffled(cached.train, size=4)
    image = Augment(zoom=1.0).build(batches, classes=1)[0]["image"]
    assert image.shape == (4, 12, 16, 3)
