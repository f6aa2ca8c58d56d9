"""Every fault planted in a step or a strategy is caught and named, none where there is none."""

import optax
import pytest
from cases import by_name, sampled
from faults_of_steps import FAULTS

import jtrain as jt
from jtrain.testing.steps import of_steps

QUICK = ["missing psum", "update before the sum"]


def rows(given):
    """What assert_invariant would come to, its loss being right."""
    rest = {n: given[n] for n in given.keys() - {"loss", "params", "batch", "strategies", "step"}}
    made = {"make": given["step"]} if "step" in given else {}
    of = jt.testing.subject(given["loss"], given["params"], given["batch"], **rest, **made)
    return list(of_steps(of, given["strategies"], lambda line: None, []))


@pytest.mark.parametrize("fault", sampled(FAULTS, QUICK, each=3))
def test_is_caught_and_named(fault):
    wrong = [row for row in rows(fault.wrong) if row.verdict == "FAILS"]
    assert {row.cause for row in wrong} == {fault.cause}
    assert any(fault.says in row.why for row in wrong)


@pytest.mark.parametrize("fault", by_name(FAULTS, ["missing psum"], pytest.mark.slow))
def test_put_right_it_is_accepted(fault):
    found = rows(fault.right)
    assert {row.verdict for row in found} <= {"ok", "rounding"}
    assert [row.check for row in found] == [row.check for row in rows(fault.wrong)]


@pytest.mark.thorough
def test_the_report_of_a_step_tells_it():
    fault = FAULTS["double psum"]
    with pytest.raises(AssertionError, match=r"4 times that of one device[\s\S]*comparisons FAIL"):
        jt.testing.assert_invariant(**{**fault.wrong, "optimizer": optax.sgd(0.1)})
