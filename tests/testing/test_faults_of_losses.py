"""Every fault that is planted in a loss is caught and named, and the same put right is accepted."""

import optax
import pytest
from faults_of_losses import FAULTS, foreign_dropout, line, points

import jtrain as jt

QUICK = ["mean of means", "padded rows counted", "batch norm on a shard", "row_keys not used"]
ACCEPTED = ["good", "dropout"]
SGD = {"optimizer": optax.sgd(0.1)}
CASES = [
    pytest.param(fault, id=name, marks=() if name in QUICK else pytest.mark.thorough)
    for name, fault in FAULTS.items()
]


def checked(given, **more):
    """The report of what assert_invariant would be given."""
    rest = {name: given[name] for name in given.keys() - {"loss", "params", "batch"}}
    of = jt.testing.subject(given["loss"], given["params"], given["batch"], **SGD, **rest)
    return jt.testing.check(of, more.get("strategies", {}))


@pytest.mark.parametrize("fault", CASES)
def test_is_caught_and_named(fault):
    report = checked(fault.wrong)
    assert not report.ok
    assert report.causes[0] == fault.cause
    assert fault.says in report.told()
    assert "Steps were not compared" in report.told()


RIGHT = {fault.right["loss"]: fault.right for fault in FAULTS.values()}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            given, id=loss.__name__, marks=() if loss.__name__ in ACCEPTED else pytest.mark.thorough
        )
        for loss, given in RIGHT.items()
    ],
)
def test_the_same_put_right_is_accepted(given):
    report = jt.testing.assert_invariant(**given, strategies={})
    assert report.causes == []
    assert len(report.rows) >= (4 if "couples" in given else 8)


def test_one_draw_for_the_batch_is_named_and_does_not_fail():
    report = jt.testing.assert_invariant(foreign_dropout, line(), points(8), strategies={})
    assert report.causes == ["one draw for the batch"]
    assert {row.verdict for row in report.rows} == {"ok", "named"}
    assert "Steps are compared without draws" in report.told()
