"""The two files that docs/experiments.md shows, written as it says and run."""

from pathlib import Path

import pytest
from quick_study import at_home
from test_notes import ROOT, blocks

from jtrain.cli import main
from jtrain.train.hooks.metrics import read_results

NOTE = ROOT / "docs" / "experiments.md"
(CODE,), (VALUES,) = blocks(NOTE, "python"), blocks(NOTE, "yaml")


def test_an_experiment_takes_at_most_thirty_lines():
    assert len(CODE.splitlines()) <= 30


@pytest.mark.thorough
def test_it_trains_to_what_the_note_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    for path, text in {"experiments/ring.py": CODE, "configs/ring.yaml": VALUES}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text, encoding="utf-8")
    at_home(tmp_path, monkeypatch, compiled)
    assert main(["run", "configs/ring.yaml"]) == 0
    assert read_results(Path("runs/ring/metrics.jsonl"), "valid")[1000]["accuracy"] > 0.97
    assert main(["run", "configs/ring.yaml", "model.widht=[8]"]) == 2
    assert main(["run", "configs/ring.yaml", "name=four", "microbatches=4", "steps=500"]) == 0
