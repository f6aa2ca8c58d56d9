"""`jtrain sweep --search optuna`: trials learn, are stored, and resume after a stop."""

import json
import sys
from pathlib import Path

import pytest
from quick_study import at_home, write_study

from jtrain.cli import main
from jtrain.sweep import processes

CONFIG = "configs/quick.yaml"
PRETENDED = Path(__file__).parent / "pretended.py"
TYPED = ["sweep", CONFIG, "optimizer.lr=1e-5..1e-2:log", "--search", "optuna", "--json"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    pretend = lambda config, member: [sys.executable, str(PRETENDED), str(config), *member.settings]
    monkeypatch.setattr(processes, "member_command", pretend)


def searched(capfd, *more: str) -> list[dict]:
    assert main([*TYPED, *more]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])["members"]


def test_a_missing_package_is_reported_with_a_command(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(TYPED) == 2
    assert "pip install 'jtrain[optuna]'" in capfd.readouterr().err


def test_an_error_at_an_end_of_a_range_is_reported_before_any_trial(capfd):
    typed = ["sweep", CONFIG, "optimizer.lr=-0.1..0.1", "--search", "optuna"]
    assert main(typed) == 2
    assert "optimizer.lr=-0.1: must be a number" in capfd.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_trials_lie_in_the_range_and_another_call_adds_to_them(capfd):
    pytest.importorskip("optuna")
    first = searched(capfd, "--trials", "3")
    assert [one["status"] for one in first] == ["done"] * 3
    rates = [float(one["point"]["optimizer.lr"]) for one in first]
    assert all(1e-5 <= rate <= 1e-2 for rate in rates)
    assert len(set(rates)) == 3
    for one, rate in zip(first, rates, strict=True):
        assert one["value"] == pytest.approx(rate * 1000 + 0.5)  # as pretended.py computes it
    assert searched(capfd, "--trials", "3") == first, "all of them are done"
    more = searched(capfd, "--trials", "12")
    assert more[:3] == first
    late = [float(one["point"]["optimizer.lr"]) for one in more[3:]]
    assert min(late) < min(rates), "the search moves to a low loss"


@pytest.mark.slow
def test_an_unfinished_trial_resumes_with_its_values(capfd, monkeypatch):
    pytest.importorskip("optuna")

    searched(capfd, "--trials", "2")
    from jtrain.checkpoint.retention import BestMetric
    from jtrain.sweep.search import Search, parse_space

    found, fixed = parse_space(["optimizer.lr=1e-5..1e-2:log"])
    search = Search(Path("runs/quick-sweep"), found, BestMetric("lowest", "loss"), seed=0)
    begun = next(search.members(3, fixed))  # as if the sweep were killed now
    after = searched(capfd, "--trials", "3")
    assert len(after) == 3
    assert after[2]["name"] == begun.name
    assert after[2]["point"] == begun.point
    assert after[2]["status"] == "done"


@pytest.mark.slow
def test_another_range_under_the_same_name_is_refused(capfd):
    pytest.importorskip("optuna")
    searched(capfd, "--trials", "1")
    assert main(["sweep", CONFIG, "optimizer.lr=1e-4..1e-3", "--search", "optuna"]) == 2
    assert "name=quick-sweep-2" in capfd.readouterr().err
