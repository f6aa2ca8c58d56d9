"""The range test finds the rates of a problem that are known, and its advice trains."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from quick_study import write_study

from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.inspect.range_test import analyze, format_result, run_range_test
from jtrain.io.jsonl import read_rows

# Least squares by plain gradient descent: with curvature 1 the best rate is 1, and above 2 the
# distance grows in every step.
CODE = '''\
import jax.numpy as jnp
import numpy as np

import jtrain as jt
from jtrain.data import Arrays, Shuffled


@jt.configclass
class Config(jt.RunConfig):
    """A bowl."""

    def build(self, place):
        draw = np.random.default_rng(0)  # noise: a loss of 0 would hide how long it grows
        points = 1 + 0.3 * draw.normal(size=(64, 16)).astype(np.float32)

        def loss(params, batch, rng):
            gap = params["w"][None] - 3 * batch["x"]
            return jt.Mean.of(0.5 * (gap**2).sum(-1), batch["mask"])

        return jt.Experiment(
            init=lambda key: ({"w": jnp.zeros(16)}, ()),
            loss=loss,
            train=Shuffled(Arrays(x=points), size=self.batch, seed=0),
            optimizer=self.optimizer.build(self.steps),
        )
'''
YAML = """\
experiment: quick
steps: 500
batch: 16
optimizer: {kind: sgd, lr: 0.1, schedule: {kind: cosine, warmup: 20}}
parallel: {kind: single}
evaluate: {every: 0}
"""


@pytest.fixture
def bowl(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(Path(), CODE, YAML)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["{kind: single}", "{kind: fsdp, devices: 4, min_size: 0}"])
def test_the_known_rates_are_found_under_each_layout(bowl, layout):
    config = resolve(bowl, [f"parallel={layout}"]).config
    found = run_range_test(config, (1e-3, 100.0), 60)
    assert found.diverged
    assert found.trouble == ""
    assert 2 < found.rates[-1] < 20  # above 2 it grows, and it is stopped soon
    lower, steepest, upper = found.lower or 0, found.steepest or 0, found.upper or 0
    assert 0 < lower < steepest < upper
    assert 0.03 < steepest < 1.0
    assert 0.5 < upper < 4.0
    assert not Path("runs").exists()
    again = run_range_test(resolve(bowl, ["parallel={kind: single}"]).config, (1e-3, 100), 60)
    assert again.steepest == found.steepest


@pytest.mark.thorough
def test_an_overflow_in_float16_takes_no_rate(bowl):
    rates = (1e-3, 0.1)
    narrow = resolve(bowl, ["precision={kind: f16, initial: 1048576}"]).config
    found, wide = (run_range_test(each, rates, 20) for each in (narrow, resolve(bowl).config))
    taken = len(found.losses)
    assert 10 < taken < 20
    assert found.rates == wide.rates[:taken]  # each has one rate, that of its update


@pytest.mark.thorough
def test_the_verb_prints_plot_and_suggestion_and_its_advice_trains(bowl, capsys):
    words = ["--rates", "1e-3:100", "--steps", "40"]
    assert main(["range", str(bowl), *words]) == 0
    shown = capsys.readouterr().out
    assert "smoothed loss over the learning rate" in shown
    assert "arXiv 1506.01186" in shown
    advised = re.search(r"try it: jtrain (run .*)", shown)
    assert advised
    fast = ["steps=60", "optimizer.schedule.warmup=5", "name=tried", "log.every=1"]
    assert main([*advised[1].split(), *fast]) == 0
    rows = read_rows(Path("runs/tried/metrics.jsonl"))
    assert rows[-1]["loss"] < 0.2 * rows[0]["loss"]
    capsys.readouterr()
    assert main(["range", str(bowl), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["diverged"]
    assert found["steepest"] == pytest.approx(float(advised[1].partition("lr=")[2]), rel=0.05)


def test_a_loss_that_never_falls_or_only_grows_says_so():
    rates = list(np.geomspace(1e-6, 1, 50))
    flat = analyze(rates, [1.0] * 50, diverged=False)
    assert flat.steepest is None
    assert "--rates 1e-06:1000" in flat.trouble
    grown = analyze(rates[:10], [1.0 + 0.5 * i for i in range(10)], diverged=True)
    assert grown.steepest is None
    assert "Begin lower: --rates 1e-09:1e-06" in grown.trouble
    falling = analyze(rates, [2.0 - 0.02 * i for i in range(50)], diverged=False)
    assert falling.steepest is not None
    assert "still falls at the highest rate" in falling.trouble
    broken = analyze(rates[:2], [math.nan, math.nan], diverged=True)
    assert "diverged at once" in broken.trouble
    for each in (flat, grown, falling, broken):
        assert each.trouble in format_result(each, "x.yaml")
