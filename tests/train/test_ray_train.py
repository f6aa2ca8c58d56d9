"""The loop of a JaxTrainer, without Ray: its arguments, its directory, its errors."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from quick_study import write_study

import jtrain as jt
from jtrain.errors import ConfigError
from jtrain.train.ray import working_directory


def test_a_run_is_in_the_directory_of_its_driver(tmp_path: Path):
    path = write_study(tmp_path / "project")
    search = ["", str(tmp_path), str(tmp_path / "project")]
    assert working_directory("configs/quick.yaml", "", search) == tmp_path / "project"
    assert working_directory("configs/quick.yaml", str(tmp_path), search) == tmp_path
    with pytest.raises(ConfigError, match='Write "directory": "/shared/project" beside "config"'):
        working_directory(str(path), "", search)
    assert working_directory(str(path), str(tmp_path), search) == tmp_path


def _ray_train(workers: int, reports: list) -> ModuleType:
    module = ModuleType("ray.train")
    context = SimpleNamespace(get_world_size=lambda: workers)
    vars(module).update(get_context=lambda: context, report=reports.append)
    return module


@pytest.mark.thorough
def test_a_worker_trains_and_reports(study_home, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reports: list[dict] = []
    monkeypatch.setitem(sys.modules, "ray.train", _ray_train(1, reports))
    jt.ray.train_loop({"config": "configs/quick.yaml", "overrides": ["steps=4", "log.every=2"]})
    trained = [report for report in reports if "loss" in report]
    assert [report["step"] for report in trained] == [2, 4]
    evaluated = [report for report in reports if "valid/loss" in report]
    assert evaluated[-1]["step"] == 4
    assert all(type(value) in {int, float} for report in reports for value in report.values())
    assert (tmp_path / "runs" / "quick" / "metrics.jsonl").exists()
