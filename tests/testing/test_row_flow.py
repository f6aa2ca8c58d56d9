"""Row couplings are found in the trace of a loss, with their lines, without running it."""

import faults_of_draws
import faults_of_neighbours as neighbours
import faults_of_numbers as numbers
import optax
import pytest
from planted import Planted
from right_losses import RIGHT

import jtrain as jt
from jtrain.testing.row_flow import trace_mean_flows


def flows(planted):
    given = {"optimizer": optax.sgd(0.1), **planted.arguments()}
    return trace_mean_flows(
        jt.testing.build_case(given.pop("loss"), given.pop("params"), given.pop("batch"), **given)
    )


def facts(mean):
    """Return the operation of each kind of fact about the contents of rows."""
    operations = {kind: where.operation for kind, where in mean.facts.items() if where.contents}
    return {kind: operation for kind, operation in operations.items() if kind != "reduced"}


TERM, METRIC = "term 0 of the loss", "the metric 'of'"


@pytest.mark.parametrize(
    ("fault", "mean", "found"),
    [
        (neighbours.FAULTS["softmax over rows"], TERM, {"meets": "reduce_max"}),
        (neighbours.FAULTS["a contrastive loss"], TERM, {"paired": "dot_general"}),
        (neighbours.FAULTS["weights by rank"], TERM, {"ranked": "sort"}),
        (neighbours.FAULTS["the neighbour's height"], TERM, {"moved": "slice"}),
        (neighbours.FAULTS["a state carried from row to row"], TERM, {"meets": "scan"}),
        (neighbours.FAULTS["a branch on the sum"], TERM, {"branch": "gt"}),
        (neighbours.FAULTS["another branch on a sum"], TERM, {"branch": "cond"}),
        (neighbours.FAULTS["a loop on the sum"], TERM, {"branch": "while"}),
        (neighbours.FAULTS["the worst row"], TERM, {"function": "reduce_max"}),
        (neighbours.FAULTS["F1 of a batch"], METRIC, {"function": "div"}),
        (faults_of_draws.FAULTS["mixup"], TERM, {"mixed": "gather"}),
        (faults_of_draws.FAULTS["rows swapped by a coin"], TERM, {"mixed": "rev"}),
        (numbers.FAULTS["a float16 sum by turns of a loop"], TERM, {"narrow": "scan"}),
        (numbers.FAULTS["squares overflow int32"], TERM, {"whole": "reduce_sum"}),
    ],
)
def test_the_coupling_operation_is_found(fault, mean, found):
    flow = flows(fault)[mean]
    kinds = {**facts(flow.weight), **facts(flow.total)}
    assert found.items() <= kinds.items()
    total = {**flow.weight.facts, **flow.total.facts}
    assert all(".py:" in total[kind].line for kind in found)


def test_a_branch_is_not_reported_as_a_statistic():
    assert set(facts(flows(neighbours.FAULTS["a branch on the sum"])[TERM].total)) == {"branch"}


ALONE = ["huber", "hinges", "tokens", "noise by row", "sorted in each row", "a loop in each row"]


@pytest.mark.parametrize("name", ALONE)
def test_independent_rows_have_no_facts(name):
    loss, given = RIGHT[name]
    for flow in flows(Planted(loss, "", "", given)).values():
        assert facts(flow.total) == facts(flow.weight) == {}
