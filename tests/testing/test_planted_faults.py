"""Every fault that is planted is named by its cause, and no loss that is right is accused."""

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
from jtrain.testing.loss_checks import of_loss

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
ACCEPTED = ["mixup of a batch that stays whole"]


def subject(planted):
    given = {"optimizer": optax.sgd(0.1), **planted.arguments()}
    return jt.testing.subject(given.pop("loss"), given.pop("params"), given.pop("batch"), **given)


def rows(planted):
    """What a check comes to before it takes steps."""
    return list(of_loss(subject(planted)))


@pytest.mark.parametrize("planted", sampled(FAULTS, QUICK, each=4))
def test_is_caught_and_its_cause_is_named(planted):
    wrong = [row for row in rows(planted) if row.verdict == "FAILS"]
    assert {row.cause for row in wrong} == {planted.cause}
    assert planted.says in wrong[0].why


@pytest.mark.parametrize("given", sampled(RIGHT, ACCEPTED, each=4))
def test_what_is_right_is_not_accused(given):
    found = rows(Planted(given[0], "", "", given[1]))
    assert {row.verdict for row in found} <= {"ok", "rounding"}
    assert len(found) >= 2


@pytest.mark.parametrize("planted", sampled(faults_of_draws.NAMED, [], each=4))
def test_a_draw_by_the_layout_is_named(planted):
    found = rows(planted)
    assert {row.cause for row in found if row.verdict == "named"} == {planted.cause}
    assert {row.verdict for row in found} <= {"ok", "named"}


REFUSED = faults_of_programs.REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_traced_is_told_its_line(name):
    loss, says = REFUSED[name]
    with pytest.raises(CodeError) as caught:
        subject(Planted(loss, ""))
    assert says in str(caught.value)
    assert f'faults_of_programs.py", line {loss.__code__.co_firstlineno + 1}' in str(caught.value)


def test_the_tables_are_large():
    assert len(FAULTS) >= 90
    assert len(RIGHT) >= 30
