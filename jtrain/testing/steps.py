"""Comparisons of steps under every strategy with the step of one device."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jtrain.core.step import make_step
from jtrain.errors import ConfigError, ShardingError
from jtrain.testing.case import LossCase, describe_error, is_raised_by_loss
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import compare_results
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.report import SINGLE, Comparison, judge
from jtrain.testing.run_step import (
    Layout,
    SplitStep,
    Steps,
    StepVariant,
    build_strategy,
    redo_update,
)
from jtrain.testing.splits import take_rows
from jtrain.testing.why_numbers import explain_rounding
from jtrain.testing.why_steps import explain_step

_UNKNOWN = Cause("unexplained", "")  # until a failure is diagnosed


def compare_steps(
    case: LossCase,
    strategies: Mapping[str, Layout],
    log: Callable[[str], None],
    not_compared: list[str],
    *,
    named: Comparison | None = None,
) -> Iterator[Comparison]:
    """Yield a comparison for each variant; variants that do not fit go to `not_compared`.

    Args:
        named: the comparison that found draws of the loss to depend on the layout, if one did: a
            step that differs is then compared with fixed draws as well.
    """
    for compared in _variants(Steps(case), strategies, not_compared):
        log(compared.name)
        try:
            yield _compare_with_cause(compared, named)
        except (ShardingError, ConfigError) as error:
            not_compared.append(f"{compared.name} was not compared: {str(error).split('. ')[0]}.")
        except Exception as error:
            if not is_raised_by_loss(error):
                raise
            fewer, raised = len(compared.parts[0]["mask"]), describe_error(error)
            found = cause("fixed number of rows", rows=case.rows, fewer=fewer, raised=raised)
            yield Comparison.explained(compared.name, found, None)


def _variants(
    steps: Steps, strategies: Mapping[str, Layout], not_compared: list[str]
) -> Iterator[SplitStep]:
    case, batch = steps.case, steps.batch
    if case.make is not make_step:
        yield SplitStep(steps, "own step", StepVariant(donate=False), [batch], "device")
    yield SplitStep(steps, "state given up", StepVariant(), [batch], "device")
    for count in (2, 4):
        if case.rows % count == 0 and case.rows_interact == "never":
            parts = [take_rows(batch, np.arange(i, case.rows, count)) for i in range(count)]
            variant = StepVariant(microbatches=count)
            yield SplitStep(steps, f"{count} microbatches", variant, parts, "microbatch")
    for name, values in strategies.items():
        strategy = build_strategy(values)
        cuts = {"batch": strategy.psum is not None, "slice": strategy.shares > 1}
        if cuts.get(case.rows_interact):
            not_compared.append(
                f"{name} was not compared: it would cut the batch, whose rows interact."
            )
            continue
        parts = [take_rows(batch, rows) for rows in np.split(np.arange(case.rows), strategy.shares)]
        yield SplitStep(steps, name, StepVariant(strategy), parts, "device")


def _compare_with_cause(compared: SplitStep, named: Comparison | None) -> Comparison:
    """Compare a variant with one device, and explain a failure."""
    if not compared.steps.case.draws:
        compared = compared.without_draws()
    drawn = _compare(compared)
    if drawn.verdict != "FAILS" or named is None:
        return _add_cause(drawn, compared)
    frozen = compared.without_draws()  # a layer draws by the layout; compare the rest
    row = _compare(frozen)
    if row.verdict == "FAILS":
        return _add_cause(row, frozen)
    return dataclasses.replace(drawn, verdict="named", why=named.why, cause=named.cause)


def _compare(compared: SplitStep) -> Comparison:
    """Compare a variant with one device, without a diagnosis."""
    case, name, single = compared.steps.case, compared.name, compared.distances()
    actual, expected = compared.actual, compared.expected
    if single.largest <= SINGLE:
        return Comparison(name, "ok", single)
    rest = single._replace(state=single.state._replace(by=0.0))
    updated = redo_update(case, actual, expected) if rest.largest <= SINGLE else None
    if updated is not None and compare_results(actual, updated).state.by <= SINGLE:
        return Comparison(name, "rounding", single)
    double = unless_opaque(compared.replace(double=True).distances)

    def explain_close() -> Cause | None:
        same = actual.finite == expected.finite
        return explain_rounding(case, single) if same else _UNKNOWN

    return judge(name, single, double, lambda: _UNKNOWN, explain_close)


def _add_cause(row: Comparison, compared: SplitStep) -> Comparison:
    """Add the cause to a comparison that fails."""
    if row.verdict != "FAILS" or row.cause == "rounding":
        return row
    found = explain_step(compared)
    return dataclasses.replace(row, why=found.why, cause=found.name)
