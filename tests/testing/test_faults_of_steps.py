"""Every fault planted in a step or a strategy is caught and named, none where there is none."""

import pytest
from faults_of_steps import FAULTS

import jtrain as jt

QUICK = ["missing psum", "update before the sum"]


def checked(given):
    """The report of what assert_invariant would be given."""
    rest = {n: given[n] for n in given.keys() - {"loss", "params", "batch", "strategies", "step"}}
    made = {"make": given["step"]} if "step" in given else {}
    of = jt.testing.subject(given["loss"], given["params"], given["batch"], **rest, **made)
    return jt.testing.check(of, given["strategies"])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=() if name in QUICK else pytest.mark.thorough)
        for name, fault in FAULTS.items()
    ],
)
def test_is_caught_and_named_and_put_right_it_is_accepted(fault):
    report = checked(fault.wrong)
    assert not report.ok
    assert report.causes == [fault.cause]
    assert fault.says in report.told()
    put_right = jt.testing.assert_invariant(**fault.right)
    assert put_right.causes == []
    assert len(put_right.rows) == len(report.rows)
