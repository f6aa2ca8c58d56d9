"""Pictures of a run: PNG files under their name and step, and curves in a terminal."""

import io
import math
from pathlib import Path

import numpy as np
import pytest

from jtrain.cli.run_summary import smooth
from jtrain.errors import DataError
from jtrain.io.png import encode_png, tile_images
from jtrain.train.charts import Pictures, text_chart, write_pictures

IMAGES = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)


def test_each_name_has_its_grid(tmp_path: Path):
    files = write_pictures(tmp_path / "pictures", 40, {"digits": IMAGES, "more": IMAGES[:1]})
    assert [file.name for file in files] == ["digits-40.png", "more-40.png"]
    assert files[0].read_bytes() == encode_png(tile_images(IMAGES))
    assert not list(tmp_path.glob("pictures/*.new"))


def test_an_array_that_is_no_image_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"picture digits: .* b h w c, and this one is \[3, 4, 1\]"):
        write_pictures(tmp_path, 1, {"digits": IMAGES[0]})


def test_a_state_is_drawn_at_its_steps_and_once(tmp_path: Path):
    seen = []

    def draw(state):
        seen.append(state)
        return {"digits": IMAGES + np.uint8(state)}

    pictures = Pictures(tmp_path, every=5, draw=draw)
    for step in (5, 10):
        pictures.on_state(step, step)
    pictures.at(10, 10)  # the end of the run
    assert seen == [5, 10]
    assert (tmp_path / "digits-5.png").read_bytes() == encode_png(tile_images(IMAGES + np.uint8(5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-10.png", "digits-5.png"]


@pytest.mark.parametrize("channels", [1, 4])
def test_the_pixels_are_those_that_were_given(channels: int):
    image = np.random.default_rng(0).integers(256, size=(5, 7, channels), dtype=np.uint8)
    opened = pytest.importorskip("PIL.Image").open(io.BytesIO(encode_png(image)))
    np.testing.assert_array_equal(np.asarray(opened).reshape(image.shape), image)


def test_a_grid_has_each_image_in_its_place():
    images = np.arange(1, 6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8)
    picture = tile_images(images)
    assert picture.shape == (2 * 3 - 1, 3 * 4 - 1, 1)
    found = [[picture[y, x, 0] for x in (0, 4, 8)] for y in (0, 3)]
    assert found == [[1, 2, 3], [4, 5, 64]]
    assert (picture[2] == 64).all()
    assert tile_images(images, columns=1).shape == (5 * 3 - 1, 3, 1)


TRAINING = [(step, 1.5 + 2.5 * math.exp(-step / 150)) for step in range(10, 1001, 10)]
VALIDATION = [(step, 1.75 + 2.25 * math.exp(-step / 150)) for step in range(0, 1001, 100)]
BOTH = {"training loss": TRAINING, "validation loss": VALIDATION}

BRAILLE = """\
4.0 ┤●
    │⠈⡆
3.5 ┤ ⠸⡀
    │  ⠣⡀
    │   ⠱⡀
3.0 ┤    ⠱●
    │     ⠱⡀
2.5 ┤      ⠘⢄
    │        ⠑⢄ ●
    │          ⠑⠤⡀
2.0 ┤            ⠈⠒⢄⣀●     ●
    │                ⠉⠒⠢⠤⣀⣀     ●    ●     ●    ●     ●    ●
    │                      ⠉⠉⠑⠒⠒⠒⠒⠤⠤⠤⠤⠤⠤⠤⠤⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀
    └┬─────────────┬────────────┬────────────┬─────────────┬
     0            250          500          750         1000
     ⠤⠤⠤ training loss   ● validation loss
"""


def test_a_picture_in_braille():
    assert text_chart(BOTH, width=60, height=16) == BRAILLE


def test_values_that_are_not_finite_are_omitted():
    holes = [(0, math.nan), *TRAINING, (2000, math.inf)]
    assert text_chart({"loss": holes}) == text_chart({"loss": TRAINING})
    assert text_chart({"loss": [(1, math.nan)], "none": []}) == ""


def test_smoothing_keeps_a_constant_and_a_line_and_averages_noise():
    assert [y for _, y in smooth([(i, 3.0) for i in range(200)])] == pytest.approx([3.0] * 200)
    noise = np.random.default_rng(0).normal(size=2000)
    smoothed = [y for _, y in smooth(list(enumerate(noise.tolist())))]
    assert smoothed[0] == noise[0]
    # An exponential mean over n has 1 / (2 n - 1) of the variance: n is 2 % of 2000.
    assert np.std(smoothed[200:]) == pytest.approx(1 / math.sqrt(2 * 40 - 1), rel=0.35)
