"""Every fault planted in a loss is found and named, and the corrected loss is accepted."""

import os

import faults_along_time
import faults_of_steps
import jax
import optax
import pytest
from cases import by_name
from faults_of_losses import FAULTS, good
from line import line, points

import jtrain as jt
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.purity import explain_impurity

QUICK = ["mean of means", "the number of the process"]
ACCEPTED = ["dropout"]


def rows(given):
    """Return the comparisons of the loss by itself."""
    rest = {name: given[name] for name in given.keys() - {"loss", "params", "batch"}}
    arguments = given["loss"], given["params"], given["batch"]
    return list(compare_loss(jt.testing.build_case(*arguments, optimizer=optax.sgd(0.1), **rest)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", by_name(FAULTS, QUICK, pytest.mark.thorough))
def test_a_fault_is_found_and_named(fault):
    wrong = [row for row in rows(fault.wrong) if row.verdict == "FAILS"]
    assert wrong[0].cause == fault.cause
    assert fault.message in wrong[0].why


def name_of(loss):
    return getattr(loss, "loss", loss).__name__


RIGHT = {name_of(fault.right["loss"]): fault.right for fault in FAULTS.values()}


@pytest.mark.thorough
@pytest.mark.parametrize("given", by_name(RIGHT, ACCEPTED, pytest.mark.slow))
def test_the_corrected_loss_is_accepted(given):
    comparisons = rows(given)
    assert {row.verdict for row in comparisons} == {"ok"}
    assert len(comparisons) == (4 if "couples" in given else 9)


def logs_on_one_process(params, batch, rng):
    if jax.process_index() == 0 and os.getpid() < 0:
        print("traced")
    jax.make_mesh((jax.device_count(),), ("data",))
    return good(params, batch, rng)


def test_numbers_of_the_host_that_change_no_operation_are_accepted():
    case = jt.testing.build_case(logs_on_one_process, line(), points(8), optimizer=optax.sgd(0.1))
    assert explain_impurity(case) is None
    assert case.side_effects.asked == {
        *("jax.process_index()", "jax.device_count()", "os.getpid()"),
    }


@pytest.mark.thorough
def test_steps_are_not_compared_where_the_loss_is_wrong():
    with pytest.raises(AssertionError, match=r"mean of the halves' own means[\s\S]*not compared"):
        jt.testing.assert_invariant(**FAULTS["mean of means"].wrong)


def test_there_are_at_least_35_faults():
    others = faults_of_steps.FAULTS, faults_along_time.FAULTS
    assert len(FAULTS) + sum(map(len, others)) >= 35
