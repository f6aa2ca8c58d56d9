"""A run in fp8 that is cut off and resumed: the same bits as one that was left alone."""

import json
from pathlib import Path

import pytest
from quick_study import kept, trained

import jtrain as jt

CONFIG = Path(__file__).parents[2] / "configs" / "shakespeare.yaml"
TINY = [
    *("data.context=8", "model.context=8", "model.layers=1", "model.heads=2", "model.width=16"),
    *("batch=4", "steps=6", "evaluate.every=0", "log.every=1", "checkpoint.every=2", "name=tiny"),
    "optimizer.schedule={kind: constant}",
]
LAYOUTS = {
    "microbatches": ["parallel.kind=single", "microbatches=2", "precision={kind: fp8}"],
    "fsdp": [
        *("parallel.kind=fsdp", "parallel.devices=2", "parallel.min_size=64"),
        "precision={kind: fp8}",
    ],
    "arrays": ["parallel.kind=single", "precision={kind: fp8, scaling: tensor}"],
}


class PowerCutError(BaseException):
    """An end that a run does not see coming."""


class PowerCut(jt.Hook):
    """End a run after a step, without a save."""

    def __init__(self, step: int):
        self.every = step

    def on_state(self, step, state, metrics):
        del step, state, metrics
        raise PowerCutError


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumes_to_the_same_bits(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    settings, found = [*TINY, *LAYOUTS[layout]], {}
    for name in ("alone", "cut"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "cut":
            with pytest.raises(PowerCutError):
                trained(CONFIG, *settings, hooks=[PowerCut(5)])
        outcome = trained(CONFIG, *settings)
        found[name] = kept(outcome)
        if name == "cut":
            assert "resumes from step 4 of 6" in outcome.directory.log.read_text()
    assert len(found["alone"]) > 10
    assert found["cut"] == found["alone"]
    rows = [json.loads(line) for line in found["cut"]["metrics.jsonl"].splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
