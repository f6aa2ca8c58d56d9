"""Faults at the borders of split sequences are found and named by their cause."""

import optax
import pytest
from faults_along_time import FAULTS, batch, over_time, params

import jtrain as jt
from jtrain.parallel import Axes

SPLIT = {"context": Axes(devices=2, context=2, fsdp=1)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wrong", "cause", "message"),
    [pytest.param(*fault, id=name, marks=pytest.mark.thorough) for name, fault in FAULTS.items()],
)
def test_a_fault_is_found_and_named(wrong, cause, message):
    case = jt.testing.build_case(over_time(wrong), params(), batch(), optimizer=optax.sgd(0.1))
    report = jt.testing.check(case, SPLIT)
    assert report.causes == [cause]
    assert [row.check for row in report.rows if row.verdict == "FAILS"] == ["context"]
    assert message in report.describe()


@pytest.mark.thorough
def test_the_corrected_loss_is_accepted():
    report = jt.testing.assert_invariant(over_time(), params(), batch(), strategies=SPLIT)
    assert report.causes == []
    assert report.rows[-1].check == "context"
