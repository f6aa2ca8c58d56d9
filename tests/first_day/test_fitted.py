"""A fit result: how it is displayed, used by another script, and trained by two processes."""

import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close
from tf_config_process import X, Y
from tf_config_process import fitted as train_alone
from two_processes import in_two_processes

import jtrain as jt
from jtrain.errors import ConfigError

STEPS = range(10, 101, 10)
HISTORY = {
    "loss": {step: 10 / step for step in STEPS}, "grad_norm": {step: 1.0 for step in STEPS},
    "accuracy": {step: step / 100 for step in STEPS},
    "valid/loss": {step: 12 / step for step in STEPS}, "valid/rows": {step: 7 for step in STEPS},
    "valid/<b>": {50: 0.5, 100: np.nan},
}  # fmt: skip


@pytest.fixture(name="fitted")
def _fitted() -> jt.Fitted:
    params = {f"layer{i}": {"kernel": np.zeros((300, 40)), "bias": np.zeros(40)} for i in range(9)}
    state = jt.new_state({"w": np.zeros(2)}, optax.identity(), jax.random.key(0))
    ended = {"step": 100, "best": None, "why": "enough", "directory": None}
    return jt.Fitted(params=params, extra=(), state=state, history=HISTORY, **ended)


def test_is_ten_lines_and_in_a_notebook_the_curves_too(fitted):
    lines = repr(fitted).splitlines()
    assert len(lines) <= 10
    assert re.fullmatch(r"  valid/loss +1.2000 at step 10 -> 0.1200 at step 100", lines[1])
    shown = fitted._repr_html_()
    root = ElementTree.fromstring(shown)  # well formed, whatever the names are
    assert root[0].text == repr(fitted)
    pictures = root.findall(".//{http://www.w3.org/2000/svg}svg")
    titles = [picture[0].text for picture in pictures]
    assert titles == ["loss", "<b>"]
    assert "<script" not in shown
    assert len(shown) < 20_000


def test_curves_are_text_elsewhere_and_can_be_written(fitted, tmp_path):
    curves = fitted.plot("loss", "accuracy")
    assert re.search(r"^loss$", repr(curves), re.MULTILINE)
    assert "train" in repr(curves)
    page = curves.save(tmp_path / "curves.html")
    assert page.read_text().count("<svg") == 2
    with pytest.raises(ConfigError, match=r"Name it curves.html"):
        curves.save(tmp_path / "curves.png")
    with pytest.raises(ConfigError, match=r"'los' is not a metric of the history, which has loss"):
        fitted.plot("los")


SCRIPT = Path(__file__).parent / "tf_config_process.py"


@pytest.mark.thorough
def test_two_workers_of_tf_config_train_one_model(tmp_path: Path, capfd):
    words = lambda port, index: (port, index, tmp_path / f"{index}.npz")
    in_two_processes(SCRIPT, words, patience=400)
    spoken = capfd.readouterr().out
    assert spoken.count("mirrored over 2 cpu devices") == 1, "the first process alone speaks"
    alone = train_alone()
    for index in range(2):
        found = np.load(tmp_path / f"{index}.npz")
        # Sums over two devices round otherwise: a few parts in 1e7 a step, six steps.
        assert_close(found["loss"], alone.evaluate((X, Y))["loss"], 1e-5)
        assert_close(found["predicted"], alone.predict(X), 1e-4)
