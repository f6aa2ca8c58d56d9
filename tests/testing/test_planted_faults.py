"""Every planted fault is named by its cause, and no correct loss fails."""

import faults_of_draws
import faults_of_masks
import faults_of_neighbours
import faults_of_numbers
import faults_of_programs
import optax
import pytest
from cases import sampled
from planted import Planted
from right_losses import RIGHT

import jtrain as jt
from jtrain.errors import CodeError
from jtrain.testing.loss_checks import compare_loss

TABLES = {
    "numbers": faults_of_numbers.FAULTS,
    "masks": faults_of_masks.FAULTS,
    "draws": faults_of_draws.FAULTS,
    "neighbours": faults_of_neighbours.FAULTS,
    "programs": faults_of_programs.FAULTS,
}
FAULTS = {f"{table}: {name}": x for table, faults in TABLES.items() for name, x in faults.items()}
QUICK = [
    "draws: numpy's draws scale",
    "neighbours: centring in training alone",
    "programs: a label too large, by one_hot",
]
ACCEPTED = ["mixup of an unsplit batch"]


def subject(planted):
    given = {"optimizer": optax.sgd(0.1), **planted.arguments()}
    return jt.testing.build_case(
        given.pop("loss"), given.pop("params"), given.pop("batch"), **given
    )


def rows(planted):
    """Return the comparisons of the loss by itself."""
    return list(compare_loss(subject(planted)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("planted", sampled(FAULTS, QUICK, each=4))
def test_a_fault_is_found_and_its_cause_is_named(planted):
    wrong = [row for row in rows(planted) if row.verdict == "FAILS"]
    assert {row.cause for row in wrong} == {planted.cause}
    assert planted.message in wrong[0].why


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize("given", sampled(RIGHT, ACCEPTED, each=4))
def test_a_correct_loss_passes(given):
    comparisons = rows(Planted(given[0], "", "", given[1]))
    assert {row.verdict for row in comparisons} <= {"ok", "rounding"}
    assert len(comparisons) >= 2


@pytest.mark.parametrize("planted", sampled(faults_of_draws.NAMED, [], each=4))
def test_a_layout_dependent_draw_is_named(planted):
    comparisons = rows(planted)
    assert {row.cause for row in comparisons if row.verdict == "named"} == {planted.cause}
    assert {row.verdict for row in comparisons} <= {"ok", "named"}


UNTRACEABLE = faults_of_programs.UNTRACEABLE


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_loss_that_cannot_be_traced_raises_with_its_line(name):
    loss, message = UNTRACEABLE[name]
    with pytest.raises(CodeError) as error:
        subject(Planted(loss, ""))
    assert message in str(error.value)
    assert f'faults_of_programs.py", line {loss.__code__.co_firstlineno + 1}' in str(error.value)


def test_there_are_at_least_90_faults_and_30_correct_losses():
    assert len(FAULTS) >= 90
    assert len(RIGHT) >= 30
