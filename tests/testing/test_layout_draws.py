"""A loss whose draws depend on the layout is no one result, and what else it does is compared."""

import pytest
from faults_of_draws import by_first_row, mixed_up, one_by_first_row, scaled
from faults_of_losses import dropout, foreign_dropout
from line import line, points

import jtrain as jt
from jtrain.parallel import Mirrored

# In one program for the whole batch, and in a copy of it for each part.
STRATEGIES = {
    "one program": Mirrored(devices=2),
    "copies": Mirrored(devices=2, impl="shard_map"),
}


def check(loss, **more):
    return jt.testing.assert_invariant(loss, line(), points(8), strategies=STRATEGIES, **more)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loss",
    [
        foreign_dropout,
        pytest.param(scaled(by_first_row), marks=pytest.mark.slow),
        pytest.param(scaled(one_by_first_row), marks=pytest.mark.slow),
    ],
)
def test_it_is_not_one_result_and_the_last_line_says_by_how_much(loss):
    with pytest.raises(AssertionError) as caught:
        check(loss)
    *_, last = str(caught.value).splitlines()
    assert last.startswith("NOT one result: what is drawn depends on the layout in")
    assert "and moves loss or gradient by up to" in last
    assert "--without-draws (draws=False)" in last
    assert "one draw for the batch" not in last
    lines = {line.split("  ")[0]: line for line in str(caught.value).splitlines()}
    assert lines["one program"].endswith("ok")  # the same draws as on one device
    assert lines["copies"].endswith("named")
    assert lines["2 microbatches"].endswith("named")


@pytest.mark.thorough
def test_without_draws_the_rest_is_one_result():
    report = check(foreign_dropout, draws=False)
    assert {row.verdict for row in report.rows} <= {"ok", "rounding"}
    assert "all draws are fixed" in report.told()
    assert report.told().splitlines()[-1].startswith("one result")


@pytest.mark.thorough
def test_what_draws_by_row_is_one_result_with_its_draws():
    report = check(dropout)
    assert report.causes == []
    assert report.plain()["ok"]


@pytest.mark.thorough
def test_mixup_of_a_batch_that_stays_whole_is_one_result():
    report = check(mixed_up, couples="batch")
    assert report.ok, report.told()
    assert [row.check for row in report.rows][-2:] == ["state given up", "one program"]
    assert "copies was not compared" in report.told()
    assert "What is drawn was not compared where a mask hides rows" in report.told()
