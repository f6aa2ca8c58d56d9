"""The smallest study, experiments/digits.py: it learns, on any number of devices alike."""

from pathlib import Path

import pytest
from comparison import assert_close
from image_files import write_digits
from quick_study import trained

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "digits.yaml"


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JTRAIN_DATA", str(write_digits(home / "digits", rows=200).parent))


def test_learns_most_digits_in_forty_steps():
    small = ("steps=40", "batch=40", "model.widths=[32]", "evaluate.batch=40", "optimizer.lr=1e-2")
    outcome = trained(CONFIG, *small, "parallel={kind: single}")
    assert outcome.results[40]["accuracy"] > 0.9
    assert outcome.results[40]["rows"] == 40


@pytest.mark.slow
def test_over_eight_devices_it_learns_the_same():
    small = ("steps=20", "batch=40", "model.widths=[32]", "evaluate.batch=40")
    one = trained(CONFIG, *small, "parallel={kind: single}")
    all_of_them = trained(CONFIG, *small, "name=eight")
    assert_close(all_of_them.results[20]["loss"], one.results[20]["loss"], 1e-4)
