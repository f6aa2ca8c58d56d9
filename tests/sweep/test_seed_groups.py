"""Settings of a sweep by their mean over seeds, some of which diverged."""

import math
from pathlib import Path

import pytest

from jtrain.checkpoint.retention import BestMetric
from jtrain.sweep.members import SweepMember
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
