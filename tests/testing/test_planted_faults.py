"""Every planted fault is named by its cause, and no correct loss or step fails."""

import os

import faults_of_programs as programs
import faults_of_rows as of_rows
import jax
import numpy as np
import optax
import pytest
from cases import by_name, sampled
from faults_along_time import FAULTS as ALONG_TIME
from faults_along_time import batch as sequences
from faults_along_time import over_time
from faults_along_time import params as attention
from faults_of_steps import FAULTS as OF_STEPS
from line import line, points
from planted import CLASSIFIER, Planted, classes, entropy, good, linear, nats
from right_losses import RIGHT

import jtrain as jt
from jtrain.core.mean import Mean
from jtrain.errors import CodeError
from jtrain.parallel import Axes
from jtrain.testing.flow import trace_mean_flows
from jtrain.testing.invariant import compare_steps
from jtrain.testing.loss_checks import compare_loss, find_counted_index
from jtrain.testing.purity import explain_impurity
from jtrain.testing.sums import Sums

NEIGHBOURS = dict(of_rows.NEIGHBOURS)
BRANCH = NEIGHBOURS.pop("a branch on the sum")  # that no part of the batch takes
TABLES = {
    "masks": of_rows.MASKS,
    "neighbours": NEIGHBOURS,
    "draws": of_rows.DRAWS,
    "numbers": programs.NUMBERS,
    "programs": programs.PROGRAMS,
    "places": programs.PLACES,
}
FAULTS = {f"{table}: {name}": x for table, faults in TABLES.items() for name, x in faults.items()}
QUICK = ["draws: numpy's draws scale", "programs: a label too large, by one_hot"]


def subject(planted):
    given = {"optimizer": optax.sgd(0.1), **planted.arguments()}
    return jt.testing.build_case(
        given.pop("loss"), given.pop("params"), given.pop("batch"), **given
    )


@pytest.mark.thorough
@pytest.mark.parametrize("planted", sampled(FAULTS, QUICK, each=2))
def test_a_fault_is_found_and_its_cause_is_named(planted):
    wrong = [row for row in compare_loss(subject(planted)) if row.verdict == "FAILS"]
    assert wrong[0].cause == planted.cause
    assert planted.message in wrong[0].why
    several = planted in programs.PLACES.values()  # a place may show in more than one way
    assert several or {row.cause for row in wrong} == {planted.cause}


@pytest.mark.thorough
@pytest.mark.parametrize("given", sampled(RIGHT, ["mixup of an unsplit batch"], each=4))
def test_a_correct_loss_passes(given):
    not_compared: list[str] = []
    case = subject(Planted(given[0], "", "", given[1]))
    comparisons = list(compare_loss(case, not_compared=not_compared))
    assert {row.verdict for row in comparisons} <= {"ok", "rounding"}
    assert len(comparisons) >= 2
    assert not [line for line in not_compared if "branches" in line]


@pytest.mark.thorough
def test_a_branch_that_the_batch_does_not_take_is_reported():
    not_compared: list[str] = []
    comparisons = compare_loss(subject(BRANCH), not_compared=not_compared)
    assert {row.verdict for row in comparisons} <= {"ok", "rounding"}
    (line,) = not_compared
    assert "term 0 of the loss branches on a sum over the rows of a slice (gt over rows" in line


@pytest.mark.parametrize("planted", sampled(of_rows.NAMED, [], each=4))
def test_a_layout_dependent_draw_is_named(planted):
    comparisons = list(compare_loss(subject(planted)))
    assert {row.cause for row in comparisons if row.verdict == "named"} == {planted.cause}
    assert {row.verdict for row in comparisons} <= {"ok", "named"}


def test_a_sum_over_an_axis_of_the_devices_raises_with_its_line():
    with pytest.raises(CodeError, match="Leave that to the step") as error:
        subject(Planted(programs.over_an_axis, ""))
    line = programs.over_an_axis.__code__.co_firstlineno + 1
    assert f'faults_of_programs.py", line {line}' in str(error.value)


def logs_on_one_process(params, batch, rng):
    if jax.process_index() == 0 and os.getpid() < 0:
        print("traced")
    jax.make_mesh((jax.device_count(),), ("data",))
    return good(params, batch, rng)


def test_numbers_of_the_host_that_change_no_operation_are_accepted():
    case = jt.testing.build_case(logs_on_one_process, line(), points(8), optimizer=optax.sgd(0.1))
    assert explain_impurity(case) is None
    asked = {"jax.process_index()", "jax.device_count()", "os.getpid()"}
    assert case.side_effects.asked == asked


@pytest.mark.thorough
def test_steps_are_not_compared_where_the_loss_is_wrong():
    wrong = programs.PROGRAMS["a mean of means"].arguments()
    with pytest.raises(AssertionError, match=r"mean of the halves' own means[\s\S]*not compared"):
        jt.testing.assert_invariant(**wrong)


# Row couplings, from the trace alone.


def flows(planted):
    return trace_mean_flows(subject(planted))


def facts(mean):
    """Return the operation of each kind of fact about the contents of rows."""
    operations = {kind: where.operation for kind, where in mean.facts.items() if where.contents}
    return {kind: operation for kind, operation in operations.items() if kind != "reduced"}


TERM, METRIC = "term 0 of the loss", "the metric 'of'"
COUPLINGS = [
    (NEIGHBOURS["softmax over rows"], TERM, {"meets": "reduce_max"}),
    (NEIGHBOURS["a contrastive loss"], TERM, {"paired": "dot_general"}),
    (NEIGHBOURS["weights by rank"], TERM, {"ranked": "sort"}),
    (NEIGHBOURS["the neighbour's height"], TERM, {"moved": "slice"}),
    (NEIGHBOURS["a state carried from row to row"], TERM, {"meets": "scan"}),
    (BRANCH, TERM, {"branch": "gt"}), (NEIGHBOURS["a loop on the sum"], TERM, {"branch": "while"}),
    (NEIGHBOURS["the worst row"], TERM, {"function": "reduce_max"}),
    (NEIGHBOURS["F1 of a batch"], METRIC, {"function": "div"}),
    (of_rows.DRAWS["mixup"], TERM, {"mixed": "gather"}),
    (of_rows.DRAWS["rows swapped by a coin"], TERM, {"mixed": "rev"}),
    (programs.NUMBERS["a float16 sum by turns of a loop"], TERM, {"narrow": "scan"}),
    (programs.NUMBERS["squares overflow int32"], TERM, {"whole": "reduce_sum"}),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "mean", "found"), COUPLINGS)
def test_the_coupling_operation_is_found(fault, mean, found):
    flow = flows(fault)[mean]
    kinds = {**facts(flow.weight), **facts(flow.total)}
    assert found.items() <= kinds.items()
    total = {**flow.weight.facts, **flow.total.facts}
    assert all(".py:" in total[kind].line for kind in found)


@pytest.mark.parametrize("name", ["tokens", "noise by row", "a loop in each row"])
def test_independent_rows_have_no_facts(name):
    loss, given = RIGHT[name]
    for flow in flows(Planted(loss, "", "", given)).values():
        assert facts(flow.total) == facts(flow.weight) == {}


# Out-of-range indices, with their row.


def find(loss, params, batch, **more):
    case = jt.testing.build_case(loss, params, batch, optimizer=optax.sgd(0.1), **more)
    return find_counted_index(case, Sums(case=case))


@pytest.mark.thorough
def test_an_index_out_of_range_has_its_row_range_and_shape():
    message = find(entropy, **programs.LATE).why
    assert "batch['label'] holds 4 in row 6, and the loss uses it to index 4 entries" in message
    assert "of an array of shape (8, 4). JAX" in message
    assert "holds 5 in row 5" in find(programs.embedded, **programs.TOKENS).why
    message = find(programs.from_one, linear(), classes(label=np.zeros(8, np.int32))).why
    assert "holds 0 in row 0" in message


def test_rows_that_count_nothing_may_hold_any_index():
    def weighted(params, batch, rng):
        return Mean.of(nats(params, batch), batch["mask"] & (batch["label"] < 4))

    late, mask = programs.LATE, np.arange(8) != 6
    assert find(programs.house_entropy, linear(), late["batch"] | {"mask": mask}) is None
    assert find(weighted, **late) is None


def test_more_batches_of_any_size_are_checked():
    good_batch = CLASSIFIER["batch"]
    assert find(programs.one_hot_labels, linear(), good_batch) is None
    label = np.where(np.arange(19) == 17, 4, np.resize(good_batch["label"], 19)).astype(np.int32)
    more = lambda: iter([good_batch, classes(19, label=label)])
    found = find(programs.one_hot_labels, linear(), good_batch, more_batches=more)
    assert "in row 17" in found.why


QUICK_STEPS = ["missing psum"]


def rows(given):
    """Return the comparisons of the steps alone."""
    rest = {n: given[n] for n in given.keys() - {"loss", "params", "batch", "strategies", "step"}}
    make = {"make": given["step"]} if "step" in given else {}
    case = jt.testing.build_case(given["loss"], given["params"], given["batch"], **rest, **make)
    return list(compare_steps(case, given["strategies"], lambda line: None, []))


@pytest.mark.thorough
@pytest.mark.parametrize("fault", sampled(OF_STEPS, QUICK_STEPS, each=3))
def test_a_fault_is_found_and_named(fault):
    wrong = [row for row in rows(fault.wrong) if row.verdict == "FAILS"]
    assert {row.cause for row in wrong} == {fault.cause}
    assert any(fault.message in row.why for row in wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", by_name(OF_STEPS, ["missing psum"], pytest.mark.slow))
def test_the_corrected_step_is_accepted(fault):
    comparisons = rows(fault.right)
    assert {row.verdict for row in comparisons} <= {"ok", "rounding"}
    assert [row.check for row in comparisons] == [row.check for row in rows(fault.wrong)]


@pytest.mark.thorough
def test_the_report_explains_the_fault_of_a_step():
    fault = OF_STEPS["double psum"]
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
