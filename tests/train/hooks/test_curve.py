import math

import numpy as np
import pytest

from jtrain.train.hooks import curve, only_ascii, smooth

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

ASCII = """\
4.0 +o
    | ..
3.5 +  ..
3.0 +   ..
    |     o.
2.5 +       ... o
2.0 +          ..... o
    |              ........o    o    o     o    o     o    o
    |                       ................................
    ++-------------+------------+------------+-------------+
     0            250          500          750         1000
     ... training loss   o validation loss
"""


def test_a_picture_in_braille():
    assert curve(BOTH, width=60, height=16) == BRAILLE


def test_a_picture_in_ascii():
    assert curve(BOTH, width=60, height=12, ascii=True) == ASCII
    assert ASCII.isascii()


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 20), (40, 8), (133, 31)])
def test_it_fits_the_given_size(width, height, ascii):
    lines = curve(BOTH, width=width, height=height, ascii=ascii).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > 0.9 * width


def test_each_dot_lies_where_its_value_is():
    x = np.linspace(0, 1, 39)
    picture = curve({"line": list(zip(x, 1 - x, strict=True))}, width=43, height=42, ascii=True)
    rows = [line.split("|")[-1].split("+")[-1] for line in picture.splitlines()[:39]]
    drawn = [[j for j, c in enumerate(row) if c == "."] for row in rows]
    assert [min(each) for each in drawn] == pytest.approx(list(range(39)), abs=1)


def test_values_that_are_not_finite_are_omitted():
    holes = [(0, math.nan), *TRAINING, (2000, math.inf)]
    assert curve({"loss": holes}) == curve({"loss": TRAINING})
    assert curve({"loss": [(1, math.nan)], "none": []}) == ""


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-9, 1e12])
def test_one_point_and_a_flat_line_are_drawn(value):
    assert "●" in curve({"none": [], "first": [(5, value)], "one": [(5, value)]})
    assert "⠤" in curve({"flat": [(1, value), (900_000, value)]})


def test_smoothing_keeps_a_constant_and_a_line_and_averages_noise():
    assert [y for _, y in smooth([(i, 3.0) for i in range(200)])] == pytest.approx([3.0] * 200)
    noise = np.random.default_rng(0).normal(size=2000)
    smoothed = [y for _, y in smooth(list(enumerate(noise.tolist())))]
    assert smoothed[0] == noise[0]
    # An exponential mean over n has 1 / (2 n - 1) of the variance: n is 2 % of 2000.
    assert np.std(smoothed[200:]) == pytest.approx(1 / math.sqrt(2 * 40 - 1), rel=0.35)


def test_an_encoding_that_has_no_braille_gets_ascii():
    assert [only_ascii(e) for e in ("utf-8", "utf-16", "ascii", "latin-1", None, "nonsense")] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
