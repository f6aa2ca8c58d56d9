"""Pictures are saved under their name and step, and a wrong array is named."""

from pathlib import Path

import numpy as np
import pytest

from jtrain.errors import DataError
from jtrain.io.png import encode_png, tile_images
from jtrain.train.hooks.samples import Pictures, write_pictures

IMAGES = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)


def test_each_name_has_its_grid(tmp_path: Path):
    files = write_pictures(tmp_path / "pictures", 40, {"digits": IMAGES, "more": IMAGES[:1]})
    assert [file.name for file in files] == ["digits-40.png", "more-40.png"]
    assert files[0].read_bytes() == encode_png(tile_images(IMAGES))
    assert not list(tmp_path.glob("pictures/*.new"))


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a\\b"])
def test_a_name_that_is_no_file_is_refused(name: str, tmp_path: Path):
    with pytest.raises(DataError, match="give it a valid file name"):
        write_pictures(tmp_path, 1, {name: IMAGES})


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
        pictures.on_state(step, step, {})
    pictures.at(10, 10)  # the end of the run
    assert seen == [5, 10]
    assert (tmp_path / "digits-5.png").read_bytes() == encode_png(tile_images(IMAGES + np.uint8(5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-10.png", "digits-5.png"]
