"""Flip, crop, zoom, mixup and cutmix: the draws, their rates, the images and their windows."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close, assert_same
from PIL import Image, ImageOps

from jtrain.data import Arrays, Shuffled
from jtrain.data.batches.shuffle import beta, random_bits, uniform
from jtrain.data.images.augment import Augment, WindowDraws, shift, zoom
from jtrain.data.images.decode import ImageSize, decode_window
from jtrain.data.images.image_folder import ImageFiles
from jtrain.data.sources.arrays import Subset

CLASSES = 5
ROWS = 40
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 5, 3), np.uint8)
LABELS = (np.arange(ROWS) % CLASSES).astype(np.int32)
# Each image has a single value, its class, so a mixture can be read from the pixels.
FLAT = np.broadcast_to(LABELS[:, None, None, None], (ROWS, 8, 8, 1)).astype(np.float32)
MANY = np.arange(20_000)
EVERY = {
    "flip": Augment(flip=0.5),
    "crop": Augment(crop=2),
    "zoom": Augment(zoom=0.2),
    "mixup": Augment(mixup=0.2),
    "cutmix": Augment(cutmix=1.0),
    "all": Augment(flip=0.5, crop=1, zoom=0.3, mixup=0.4, cutmix=1.0),
}


def batches(augment: Augment, *, image=IMAGES, size=16, seed=3, **options):
    source = Arrays(image=image, label=LABELS)
    return augment.build(Shuffled(source, size=size, seed=seed, **options), classes=CLASSES)


@pytest.mark.parametrize("name", ["zoom", "all"])
def test_a_row_draws_the_same_however_the_batch_is_sharded(name: str):
    whole = batches(EVERY[name])
    for count in (2, 16):
        for step in (0, 7):
            parts = [batches(EVERY[name]).shard(index, count)[step] for index in range(count)]
            joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            assert_same(joined, whole[step])


def test_rows_and_masks_are_unchanged():
    plain, changed = (batches(augment, end="pad") for augment in (Augment(), EVERY["all"]))
    for step in range(4):
        for name in ("row", "mask", "label"):
            np.testing.assert_array_equal(changed[step][name], plain[step][name], strict=True)
    for known in ("size", "ragged", "rows", "end"):  # an epoch's length depends on them
        assert getattr(changed, known) == getattr(plain, known)
    assert [changed.epoch_of(step) for step in range(9)] == [plain.epoch_of(s) for s in range(9)]


def test_images_are_flipped_at_the_configured_rate():
    plain, changed = batches(Augment(), size=40), batches(Augment(flip=0.3), size=40)
    flips = 0
    for step in range(50):
        image, flipped = plain[step]["image"], changed[step]["image"]
        mirror = image[:, :, ::-1]
        is_mirror = (flipped == mirror).all((1, 2, 3))
        assert ((flipped == image).all((1, 2, 3)) | is_mirror).all()
        flips += is_mirror.sum()
    assert abs(flips / 2000 - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 2000)


def test_every_crop_is_a_window_of_the_padded_image():
    image, pad, seen = IMAGES, 2, set()
    for down in range(5):
        for right in range(5):
            got = shift(image[:1], np.array([down]), np.array([right]), pad)[0]
            edge = [(pad, pad), (pad, pad), (0, 0)]
            expected = np.pad(image[0], edge)[down : down + 6, right : right + 5]
            np.testing.assert_array_equal(got, expected, strict=True)
            seen.add(got.tobytes())
    assert len(seen) == 25
    centre = shift(image, np.full(ROWS, pad), np.full(ROWS, pad), pad)
    np.testing.assert_array_equal(centre, image)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_the_chances_are_the_shares_of_the_pixels(name: str):
    changed, mixed = batches(EVERY[name], image=FLAT, size=40), 0
    for step in range(10):
        batch = changed[step]
        assert batch["chances"].shape == (40, CLASSES)
        assert batch["chances"].dtype == batch["image"].dtype == np.float32
        assert_close(batch["chances"].sum(1), 1, 1e-6)
        assert batch["chances"].min() >= 0
        shown = batch["image"].mean((1, 2, 3))  # the expected class, by the pixels
        assert_close(batch["chances"] @ np.arange(CLASSES), shown, 1e-5, terms=1)
        mixed += (batch["chances"].max(1) < 0.999).sum()
    assert mixed > 50


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_are_those_of_a_beta(alpha: float):
    shares = beta(1, 2, MANY, 0, alpha)
    variance = 1 / (4 * (2 * alpha + 1))
    assert 0 <= shares.min() < 0.01
    assert 0.99 < shares.max() <= 1
    assert abs(shares.mean() - 0.5) < 4 * np.sqrt(variance / len(MANY))
    assert abs(shares.var() / variance - 1) < 0.04
    quarters = np.quantile(np.random.default_rng(0).beta(alpha, alpha, 200_000), [0.25, 0.4, 0.75])
    for quarter, share in zip(quarters, (0.25, 0.4, 0.75), strict=True):
        assert abs((shares <= quarter).mean() - share) < 0.015


def test_partners_are_drawn_from_the_whole_set():
    """Mix every class into a batch that has only one."""
    labels = np.repeat(np.arange(CLASSES), ROWS // CLASSES).astype(np.int32)
    image = np.broadcast_to(labels[:, None, None], (ROWS, 4, 4)).astype(np.float32)
    changed = Augment(mixup=1.0).build(
        Shuffled(Arrays(image=image, label=labels), size=1, seed=0), classes=CLASSES
    )
    partners = np.zeros(CLASSES)
    for step in range(300):
        batch = changed[step]
        others = batch["chances"][0].copy()
        others[batch["label"][0]] = 0
        partners += others > 0
    expected = 300 * (1 - 1 / CLASSES) / CLASSES
    assert abs(partners - expected).max() < 5 * np.sqrt(expected)


def test_draws_are_pinned_and_lanes_are_independent():
    row = np.arange(1000)
    digest = hashlib.sha256(random_bits(7, 123, row, 5).astype("<u8").tobytes()).hexdigest()
    assert digest[:16] == PINNED, "runs that were measured stay comparable"
    draws = np.stack(
        [uniform(s, t, MANY, lane) for s, t, lane in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    )
    apart = np.corrcoef(draws) - np.eye(4)
    assert abs(apart).max() < 4 / np.sqrt(len(MANY))
    assert abs(np.corrcoef(draws[0][:-1], draws[0][1:])[0, 1]) < 4 / np.sqrt(len(MANY))


PINNED = "d8a305b1b705ad1a"


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


@pytest.mark.parametrize(
    ("suffix", "width", "height"), [("png", 20, 17), ("jpg", 31, 50), ("png", 9, 7)]
)
def test_a_window_is_the_triangle_sum_over_the_pixels_of_the_file(tmp_path, suffix, width, height):
    path = tmp_path / f"a.{suffix}"
    photograph(width, height).save(path)
    got, exact = windows_of(path, SIZE, smallest=0.3)  # so that none is decoded at a half
    # Each of the two passes rounds to a whole number, with weights of 8 bits.
    assert np.abs(got - exact).max() <= 2.5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_windows_at_a_fraction_are_close_to_those_of_a_full_decode(tmp_path, orientation: int):
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


SMOOTH = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (48, 40), Image.Resampling.BICUBIC
    )
)


def test_a_window_is_resized_as_by_pillow():
    box = (8, 4, 32, 24)  # left, top, right, bottom
    enlarged = Image.fromarray(SMOOTH).resize((48, 40), Image.Resampling.BILINEAR, box=box)
    got = zoom(SMOOTH[None], np.array([[4.0, 8.0, 20.0, 24.0]]))[0].astype(int)
    inner = (slice(2, -2), slice(2, -2))  # Pillow does not read beyond the edge of the box
    far = np.abs(got - np.asarray(enlarged).astype(int))[inner]
    assert far.max() <= 2, "each rounds to whole numbers, Pillow twice"


def test_windows_are_within_the_image_and_have_the_configured_share_and_shape():
    draws = np.random.default_rng(2).random((4, 20_000))
    top, left, high, wide = WindowDraws(0.2, draws).windows(40, 60, 60 / 40).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + high <= 40 + 1e-9).all()
    assert (left + wide <= 60 + 1e-9).all()
    share, shape = high * wide / 2400, wide / high / 1.5
    assert share.min() >= 0.2 * 0.75
    assert share.max() <= 1 + 1e-9
    assert shape.min() >= 0.75 - 1e-9
    assert shape.max() <= 4 / 3 + 1e-9
    # Uniform in 0.2 .. 1, except for windows above 0.75, which are cut to the image.
    assert np.mean(share < 0.4) == pytest.approx(0.25, abs=0.02)  # 6 sigma of 20,000 draws
