"""`jtrain check`: the split of a batch must not change what a config trains."""

import json
from pathlib import Path

import pytest
from quick_study import at_home, write_study

from jtrain.cli import main


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # `check` sets it only if it is not set


@pytest.mark.thorough
def test_all_comparisons_of_a_config_hold(tmp_path: Path, capfd):
    config = str(write_study(tmp_path))
    assert main(["check", config, "--rows", "4", "--devices", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["config"] == config
    assert found["ok"] is True
    assert "4 of the" in found["what"]
    checks = {check["check"]: check for check in found["checks"]}
    names = {"padded", "2 microbatches", "shard_map on 2", "fsdp on 2 (zero 3)"}
    assert names <= set(checks)
    assert all(check["verdict"] in {"ok", "rounding"} for check in found["checks"])
    assert checks["padded"]["float64"]["gradient"] < 1e-12
    assert 0 < checks["shard_map on 2"]["float32"]["gradient"] < 1e-6


@pytest.mark.thorough
def test_a_fault_ends_with_70_and_a_sentence(tmp_path: Path, capfd):
    config = write_study(tmp_path)
    study = next((tmp_path / "experiments").glob("*.py"))
    code = study.read_text()
    assert "cross_entropy(" in code
    wrong = (
        "\n\n_right = cross_entropy\n\n\ndef cross_entropy(*given, **more):\n"
        "    mean, metrics = _right(*given, **more)\n"
        "    return jt.Mean(mean.total / mean.weight, jnp.float32(1)), metrics\n"
    )
    head, tail = code.split("\n\n\n@jt.configclass", 1)
    study.write_text(f"{head}{wrong}\n\n@jt.configclass{tail}")
    assert main(["check", str(config), "--rows", "4", "--devices", "2"]) == 70
    out = capfd.readouterr().out
    assert "mean of the halves' own means" in out
    assert "Steps were not compared" in out
    assert "comparisons FAIL." in out
