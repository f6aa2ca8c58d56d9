"""Settings of `jtrain sweep CONFIG`, and the grids they define."""

import itertools
import json
import math
from pathlib import Path

import pytest

from jtrain.checkpoint.retention import BestMetric
from jtrain.cli import main
from jtrain.errors import DONE
from jtrain.sweep import sweep
from jtrain.sweep.members import SweepMember, build_members, label, parse_grid
from jtrain.sweep.sweep import MemberScore, as_json, rank_groups


def test_the_last_key_changes_fastest_and_single_values_are_fixed():
    found = parse_grid(["optimizer.lr=1e-4,3e-4", "steps=20", "seed=0..2"])
    assert found.fixed == ["steps=20"]
    wanted = itertools.product(["1e-4", "3e-4"], ["0", "1", "2"])
    assert [tuple(point.values()) for point in found.points()] == list(wanted)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]), ("[8,16]", ["[8,16]"]), ("[8,16],[32]", ["[8,16]", "[32]"]),
        ("{kind: sgd, lr: 1},{kind: adamw}", ["{kind: sgd, lr: 1}", "{kind: adamw}"]),
        ("'a,b',c", ["'a,b'", "c"]), ('"]",[1]', ['"]"', "[1]"]), ("0..3", ["0", "1", "2", "3"]),
        ("0..10..5,64", ["0", "5", "10", "64"]), ("-2..0", ["-2", "-1", "0"]),
        ("../text,a..b/c", ["../text", "a..b/c"]), ("true, false", ["true", "false"]),
    ],
)  # fmt: skip
def test_values(text, values):
    found = parse_grid([f"key={text}"])
    assert (found.axes.get("key") or [found.fixed[0].partition("=")[2]]) == values


def test_labels_are_short_plain_and_distinguish_keys():
    point = {"optimizer.lr": "1e-4", "model.channels": "[8,16]", "seed": "-1"}
    assert label(point, list(point)) == "lr=1e-4,channels=8-16,seed=-1"
    both = {"data.size": "1", "model.size": "../x y"}
    assert label(both, list(both)) == "data.size=1,model.size=..-x-y"


LOWEST = BestMetric("lowest", "loss")


def score(lr: str, seed: int, value: float) -> MemberScore:
    point = {"optimizer.lr": lr, "seed": str(seed)}
    return MemberScore(SweepMember(f"s/{lr},{seed}", point, (), Path("runs")), "done", value, 10)


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_diverged_seed_makes_its_setting_the_worst(diverged: float):
    scores = [score("1", 0, 0.1), score("1", 1, diverged), score("2", 0, 0.5), score("2", 1, 0.7)]
    assert [group.point["optimizer.lr"] for group in rank_groups(scores, LOWEST)] == ["2", "1"]
    assert math.isnan(as_json("s", scores, LOWEST)["groups"][1]["spread"])


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
