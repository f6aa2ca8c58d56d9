"""Every fault planted in a step, a strategy or along a split sequence is found and named."""

import optax
import pytest
from cases import by_name, sampled
from faults_along_time import FAULTS as ALONG_TIME
from faults_along_time import batch as sequences
from faults_along_time import over_time
from faults_along_time import params as attention
from faults_of_steps import FAULTS

import jtrain as jt
from jtrain.parallel import Axes
from jtrain.testing.steps import compare_steps

QUICK = ["missing psum", "update before the sum"]


def rows(given):
    """Return the comparisons of the steps alone."""
    rest = {n: given[n] for n in given.keys() - {"loss", "params", "batch", "strategies", "step"}}
    make = {"make": given["step"]} if "step" in given else {}
    case = jt.testing.build_case(given["loss"], given["params"], given["batch"], **rest, **make)
    return list(compare_steps(case, given["strategies"], lambda line: None, []))


@pytest.mark.thorough
@pytest.mark.parametrize("fault", sampled(FAULTS, QUICK, each=3))
def test_a_fault_is_found_and_named(fault):
    wrong = [row for row in rows(fault.wrong) if row.verdict == "FAILS"]
    assert {row.cause for row in wrong} == {fault.cause}
    assert any(fault.message in row.why for row in wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", by_name(FAULTS, ["missing psum"], pytest.mark.slow))
def test_the_corrected_step_is_accepted(fault):
    comparisons = rows(fault.right)
    assert {row.verdict for row in comparisons} <= {"ok", "rounding"}
    assert [row.check for row in comparisons] == [row.check for row in rows(fault.wrong)]


@pytest.mark.thorough
def test_the_report_explains_the_fault_of_a_step():
    fault = FAULTS["double psum"]
    with pytest.raises(AssertionError, match=r"4 times that of one device[\s\S]*comparisons FAIL"):
        jt.testing.assert_invariant(**{**fault.wrong, "optimizer": optax.sgd(0.1)})


SPLIT = {"context": Axes(devices=2, context=2, fsdp=1)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wrong", "cause", "message"),
    [
        pytest.param(*fault, id=name, marks=pytest.mark.thorough)
        for name, fault in ALONG_TIME.items()
    ],
)
def test_a_fault_along_time_is_found_and_named(wrong, cause, message):
    case = jt.testing.build_case(
        over_time(wrong), attention(), sequences(), optimizer=optax.sgd(0.1)
    )
    report = jt.testing.check(case, SPLIT)
    assert report.causes == [cause]
    assert [row.check for row in report.rows if row.verdict == "FAILS"] == ["context"]
    assert message in report.describe()


@pytest.mark.thorough
def test_the_corrected_loss_along_time_is_accepted():
    report = jt.testing.assert_invariant(over_time(), attention(), sequences(), strategies=SPLIT)
    assert report.causes == []
    assert report.rows[-1].check == "context"
