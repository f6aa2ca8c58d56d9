"""The two towers of experiments/two_towers.py: rows that meet meet over all devices."""

from pathlib import Path

import pytest
from comparison import assert_close
from image_files import write_digits
from quick_study import trained

from jtrain.train.hooks.log import read_results

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "two_towers.yaml"
NETWORK = ("model.widths=[16]", "model.outputs=8", "optimizer.lr=1e-2")
SMALL = (*NETWORK, "batch=40", "evaluate.batch=40", "log.every=1", "steps_per_call=1")


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JTRAIN_DATA", str(write_digits(home / "digits", rows=200).parent))


def test_the_loss_over_eight_devices_is_that_of_one():
    curves = []
    for parallel in ("single", "mirrored"):
        settings = ("steps=10", f"parallel={{kind: {parallel}}}", f"name={parallel}")
        outcome = trained(CONFIG, *SMALL, *settings)
        rows = read_results(outcome.directory.metrics, "").values()
        curves.append([row["loss"] for row in rows] + [outcome.results[10]["loss"]])
    one, eight = curves
    assert len(one) == 11
    assert one[9] < 0.95 * one[0]
    assert_close(eight, one, 1e-5)
