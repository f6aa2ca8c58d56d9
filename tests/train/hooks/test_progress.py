"""A live line of progress, curves in a terminal, and pictures of a run."""

import contextlib
import io
import math
import types
from pathlib import Path

import numpy as np
import pytest

from jtrain.io.png import encode_png, tile_images
from jtrain.train.charts import text_chart
from jtrain.train.hooks import ProgressBar
from jtrain.train.run_hooks import show_results


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A CI may set what makes rich believe that every file is a terminal, or none.
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def screen(path, *, terminal):
    """Return a stream to a file, with a given `isatty`."""
    with path.open("w", encoding="utf-8") as stream:
        stream.isatty = lambda: terminal
        yield stream


def look_at(progress, clock, steps, *, seconds, first=1, last=None):
    """Return the steps that were drawn, of steps that take `seconds` each."""
    looks = []
    for step in range(first, first + steps):
        clock[0] += seconds
        if step % progress.every == 0 or step == last:
            progress.on_numbers(step, {"loss": 1.0})
            looks.append(step)
    return looks


@pytest.mark.thorough
def test_it_draws_a_few_times_a_second_however_fast_the_steps_are(tmp_path):
    clock, path = [0.0], tmp_path / "screen"
    with (
        screen(path, terminal=True) as stream,
        ProgressBar(stop=200_000, stream=stream, clock=lambda: clock[0]) as progress,
    ):
        fast = look_at(progress, clock, 150_000, seconds=1e-4)
        first = [step for step in fast if step <= 4_000]  # all, until it knows how fast they are
        assert len(first) < 2_020
        assert 2 * 15 < len(fast) - len(first) < 10 * 15
        slow = look_at(progress, clock, 5_000, seconds=0.09, first=150_001)
        assert progress.every == 2
        assert 2_000 < len(slow) < 4_000
        rest = look_at(progress, clock, 45_000, seconds=1e-4, first=155_001, last=200_000)
    assert rest[-1] == 200_000
    drawn = path.read_text(encoding="utf-8").count("/200000")
    assert 2 * 15 < drawn < 5 * (15 + 450 + 5)


def test_without_a_live_line_it_checks_once(tmp_path):
    clock, path = [0.0], tmp_path / "screen"
    with (
        screen(path, terminal=False) as stream,
        ProgressBar(stop=1000, stream=stream, clock=lambda: clock[0]) as progress,
    ):
        assert look_at(progress, clock, 1000, seconds=1e-3) == [1000]
        progress.print("a line")
    assert path.read_text() == "a line\n"


IMAGES = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)


def test_a_state_is_drawn_at_its_steps_and_once(tmp_path: Path):
    seen = []

    def draw(state):
        seen.append(state)
        return {"digits": IMAGES + np.uint8(state)}

    some = types.SimpleNamespace
    program = some(
        resolved=some(experiment=some(pictures=draw, sample=None)), gather_weights=lambda x: (x,)
    )
    files = some(first=True, pictures=tmp_path)
    config = some(log=some(pictures=5), steps=10)
    run = some(config=config, program=program, files=files)
    sent = []
    tracking = some(show=lambda step, shown: sent.append((step, shown)))
    pictures, _ = show_results(run, lambda activity: contextlib.nullcontext(), tracking)
    for step in (5, 10, 10):  # once more at the end of the run
        pictures.on_state(step, step)
    assert seen == [5, 10]
    assert sent[0] == (5, {"digits": tmp_path / "digits-5.png"})
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
