"""Display of a fit result: ten lines, a table with curves, a picture of each metric."""

import dataclasses
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest

import jtrain as jt
from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.errors import ConfigError, LossError
from jtrain.train.hooks.evaluation import EvaluationResult
from jtrain.train.svg_chart import chart

STEPS = range(10, 101, 10)
HISTORY = {
    "loss": {step: 10 / step for step in STEPS},
    "grad_norm": {step: 1.0 for step in STEPS},
    "accuracy": {step: step / 100 for step in STEPS},
    "valid/loss": {step: 12 / step for step in STEPS},
    "valid/rows": {step: 7 for step in STEPS},
    "valid/<b>": {50: 0.5, 100: np.nan},
}


@pytest.fixture(name="fitted")
def _fitted() -> jt.Fitted:
    params = {f"layer{i}": {"kernel": np.zeros((300, 40)), "bias": np.zeros(40)} for i in range(9)}
    return jt.Fitted(
        params=params,
        extra=(),
        state=jt.new_state({"w": np.zeros(2)}, optax.identity(), jax.random.key(0)),
        history=HISTORY,
        step=100,
        best=None,
        why="enough",
        directory=None,
    )


def test_is_told_in_ten_lines(fitted):
    lines = repr(fitted).splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith("Fitted: 100 steps, 108,360 parameters (layer0/bias [40], layer0/ke")
    assert lines[0].endswith("and 15 more)")
    assert re.fullmatch(r"  valid/loss +1.2000 at step 10 -> 0.1200 at step 100", lines[1])
    assert "grad_norm" not in repr(fitted)
    assert "valid/rows" not in repr(fitted)
    assert "  ended: enough" in lines
    assert (
        'next: result.plot(), result.evaluate(data), result.params, result.history["loss"]' in lines
    )
    assert max(map(len, lines)) < 120


def test_is_a_table_with_curves_in_a_notebook(fitted):
    shown = fitted._repr_html_()
    root = ElementTree.fromstring(shown)  # well formed, whatever the names are
    assert len(root.findall(".//tr")) == 4
    pictures = root.findall(".//{http://www.w3.org/2000/svg}svg")
    titles = [picture[0].text for picture in pictures]
    assert titles == ["loss", "<b>"]
    assert "<script" not in shown
    assert len(shown) < 20_000


def test_curves_have_each_set_its_own_line(fitted):
    root = ElementTree.fromstring(chart("loss", {"train": HISTORY["loss"], "valid": {5: 1.0}}))
    space = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{space}polyline")
    dots = [tuple(map(float, dot.split(","))) for dot in line.attrib["points"].split()]
    assert len(dots) == 10
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    assert [y for _, y in dots] == sorted(y for _, y in dots), "a loss that falls goes down"
    (dot,) = root.findall(f"{space}circle")
    assert dot.attrib["fill"] != line.attrib["stroke"]
    names = [text.text for text in root.findall(f"{space}text")]
    assert {"loss", "train", "valid", "step", "5", "100"} <= set(names)


def test_wide_ranges_get_a_logarithmic_axis_and_nothing_finite_no_picture():
    assert "loss (log)" in chart("loss", {"train": {1: 1e4, 2: 1.0}})
    assert "(log)" not in chart("loss", {"train": {1: -1e4, 2: 1.0}})
    assert chart("loss", {"train": {1: np.nan, 2: np.inf}}) == ""
    assert chart("loss", {"train": {3: 0.0}}).count("<circle") == 1


def test_curves_are_text_elsewhere_and_can_be_written(fitted, tmp_path):
    curves = fitted.plot("loss", "accuracy")
    assert re.search(r"^loss$", repr(curves), re.MULTILINE)
    assert "train" in repr(curves)
    page = curves.save(tmp_path / "curves.html")
    assert page.read_text().count("<svg") == 2
    assert fitted.plot("loss").save(tmp_path / "loss.svg").read_text().startswith("<svg")
    with pytest.raises(ConfigError, match=r'result.plot\("loss"\).save'):
        curves.save(tmp_path / "curves.svg")
    with pytest.raises(ConfigError, match=r"Name it curves.html"):
        curves.save(tmp_path / "curves.png")
    with pytest.raises(ConfigError, match=r"'los' is no metric of the history, which has loss"):
        fitted.plot("los")


def test_curves_can_be_drawn_on_axes_of_matplotlib(fitted):
    drawn = []
    axes = SimpleNamespace(
        plot=lambda x, y, label: drawn.append((label, len(x), len(y))),
        set_xlabel=drawn.append,
        set_ylabel=drawn.append,
        legend=lambda: drawn.append("legend"),
    )
    fitted.plot("loss", ax=axes)
    assert drawn == [("train", 10, 10), ("valid", 10, 10), "step", "loss", "legend"]


def test_what_it_cannot_do_is_told(fitted):
    with pytest.raises(ConfigError, match=r"Use result\.params, or"):
        _ = fitted.model
    with pytest.raises(LossError, match=r"jt.predict\(apply, result.params, data\)"):
        fitted.predict(np.zeros((3, 2)))


def test_an_array_is_shown_by_its_shape_and_has_no_curve(fitted):
    array = {50: np.ones((2, 2)), 100: np.ones((2, 2))}
    best = EvaluationResult(50, {"loss": 0.25, "confusion": array[50]})
    history = {"loss": {50: 1.0, 100: 0.5}, "valid/confusion": array}
    found = dataclasses.replace(fitted, history=history, best=best)
    assert "valid/confusion    array of [2, 2] at step 100" in repr(found)
    assert "best: loss 0.2500 at step 50" in repr(found)
    assert "array of [2, 2]" in found._repr_html_()
    assert list(found.plot().metrics) == ["loss"]
    with pytest.raises(
        ConfigError, match=r"result\.history\[NAME\]. Write result\.plot\(\"loss\"\)"
    ):
        found.plot("confusion")
    with pytest.raises(LossError, match=r"confusion is an array of .*, such as loss"):
        best_step(array, BestMetric("lowest", "confusion"))
    with pytest.raises(LossError, match=r"confusion is an array of .*, such as loss"):
        jt.EarlyStop("confusion").on_results(50, "valid", {50: {"confusion": array[50]}})
