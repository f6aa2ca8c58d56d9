"""Results of a sweep where seeds diverged or members failed, and names of similar members."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jtrain.checkpoint.retention import BestMetric
from jtrain.cli import main
from jtrain.errors import DONE, FAULT
from jtrain.sweep import sweep
from jtrain.sweep.grid import parse_grid
from jtrain.sweep.members import SweepMember, build_members
from jtrain.sweep.processes import MemberExit
from jtrain.sweep.results import MemberScore, as_json, format_table, rank_groups

LOWEST = BestMetric("lowest", "loss")


def score(lr: str, seed: int, value: float) -> MemberScore:
    point = {"optimizer.lr": lr, "seed": str(seed)}
    return MemberScore(SweepMember(f"s/{lr},{seed}", point, (), Path("runs")), "done", value, 10)


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_diverged_seed_makes_its_setting_the_worst(diverged: float):
    scores = [score("1", 0, 0.1), score("1", 1, diverged), score("2", 0, 0.5), score("2", 1, 0.7)]
    assert [group.point["optimizer.lr"] for group in rank_groups(scores, LOWEST)] == ["2", "1"]
    table = format_table(scores, LOWEST)
    assert table[2].split() == [
        "1",
        str(diverged),
        "+-",
        "nan",
        "0:",
        "0.1000",
        "1:",
        f"{diverged}",
    ]
    assert math.isnan(as_json("s", scores, LOWEST)["groups"][1]["spread"])


def test_seeds_that_diverged_both_ways_have_no_mean():
    (group,) = rank_groups([score("1", 0, math.inf), score("1", 1, -math.inf)], LOWEST)
    assert math.isnan(group.mean)


def test_a_trial_that_failed_after_an_evaluation_has_no_result(monkeypatch):
    told = []
    search: Any = SimpleNamespace(
        all=lambda fixed: [],
        members=lambda n, f: iter(()),
        tell=lambda *result: told.append(result),
    )
    of = score("1", 0, 0.1)
    monkeypatch.setattr(sweep, "score_member", lambda member, goal: of)
    plan = sweep._search_plan(search, [], 3, LOWEST)
    for code in (FAULT, DONE, -9):
        plan.note(MemberExit(of.member, code, 1.0))
    assert [value for _, value in told] == [None, 0.1, None]


def test_members_of_similar_values_have_directories_of_their_own():
    members = build_members("s", parse_grid(["data.folder=a,a/,a-2"]))
    assert [one.label for one in members] == ["folder=a", "folder=a-2", "folder=a-2-2"]


def test_the_json_of_a_diverged_seed_is_json(monkeypatch, capsys):
    scores = [score("1", 0, math.nan), score("1", 1, math.inf), score("2", 0, 0.5)]
    found = sweep.SweepResult("s", LOWEST, scores, "")
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: found)
    assert main(["sweep", "config.yaml", "--json"]) == DONE
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["groups"][1]["seeds"] == {"0": "NaN", "1": "Infinity"}
