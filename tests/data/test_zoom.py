"""Windows resized to the image: against Pillow, and their distribution."""

import numpy as np
import pytest
from PIL import Image

from jtrain.data import Arrays, Shuffled
from jtrain.data.images.augment import Augment
from jtrain.data.images.windows import WindowDraws, zoom

SMOOTH = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (48, 40), Image.Resampling.BICUBIC
    )
)


def whole(height: int, width: int) -> np.ndarray:
    return np.array([[0.0, 0.0, height, width]])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(1, 7, 5, 3), (1, 7, 5), (1, 1, 1, 1)])
def test_the_full_window_is_the_image(dtype, shape: tuple[int, ...]):
    image = np.random.default_rng(1).integers(0, 256, shape).astype(dtype)
    np.testing.assert_array_equal(zoom(image, whole(*shape[1:3])), image, strict=True)


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


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (30, 300), (50, 50)])
def test_windows_for_a_square_have_nearly_its_shape(height: int, width: int):
    draws = np.random.default_rng(3).random((4, 5_000))
    top, left, high, wide = WindowDraws(0.08, draws).windows(height, width, 1.0).T
    assert np.all((top >= 0) & (left >= 0) & (top + high <= height + 1e-9))
    assert np.all(left + wide <= width + 1e-9)
    assert np.all((wide / high >= 0.75 - 1e-9) & (wide / high <= 4 / 3 + 1e-9))
    share = high * wide / (height * width)
    most = min(height, width) ** 2 * 0.75 / (height * width)  # of a window of any shape
    assert share.max() <= 1
    # Below the share that fits in every shape, shares are uniform in 0.08 .. 1.
    assert np.mean(share < most) == pytest.approx(max(most - 0.08, 0) / 0.92, abs=0.03)


def test_no_zoom_changes_nothing_and_one_changes_most():
    rows = Arrays(image=np.repeat(SMOOTH[None], 20, 0), label=np.zeros(20, np.int32))
    plain = Shuffled(rows, size=20)
    assert Augment().build(plain, classes=2) is plain
    changed = Augment(zoom=0.1).build(plain, classes=2)[0]["image"]
    assert changed.dtype == np.uint8
    assert all((one != SMOOTH).any() for one in changed)
