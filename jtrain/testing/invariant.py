"""Split invariance: a check that a loss and its step give one result for every split of a batch."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import optax

from jtrain.core.step import make_step
from jtrain.core.types import Batch, Dims, Extra, Params, RowsInteract
from jtrain.errors import ConfigError, ShardingError
from jtrain.testing.case import (
    Loss,
    LossCase,
    MakeStep,
    PlacedLoss,
    build_case,
    describe_error,
    is_raised_by_loss,
)
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import compare_results
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.report import SINGLE, CheckReport, Comparison, judge
from jtrain.testing.run_step import (
    Layout,
    SplitStep,
    Steps,
    StepVariant,
    build_strategy,
    list_layouts,
    redo_update,
)
from jtrain.testing.splits import take_rows
from jtrain.testing.why_numbers import explain_rounding
from jtrain.testing.why_steps import explain_step


def assert_invariant(
    loss: Loss | PlacedLoss,
    params: Params,
    batch: Batch,
    optimizer: optax.GradientTransformation | None = None,
    step: MakeStep | None = None,
    strategies: Mapping[str, Layout] | None = None,
    *,
    extra: Extra = (),
    rows_interact: RowsInteract = "never",
    dims: Mapping[str, Dims] = {},
    seed: int = 0,
    draws: bool = True,
    ragged: bool = True,
) -> CheckReport:
    """Raise unless the result of a loss is the same for every split of the batch.

    Args:
        loss: any form that `jtrain.make_step` takes, or `place_loss(build)`, where
            `build(placement)` returns the loss for a placement.
        batch: arrays of at least 2 rows, better 8; missing `row` and `mask` are added.
        optimizer: the optimizer of the step; plain gradient descent by default.
        step: a function with the signature of `jtrain.make_step`, to check a step of your own.
        strategies: values of `jtrain.parallel`, or strategies, by name; by default all that fit
            the rows and the available devices.
        extra: the argument of the loss that is not differentiated.
        rows_interact: as in `make_step`; declared interactions of rows are not compared.
        dims: the names of the dims of each parameter, by the parameter's name.
        seed: seed of the run's key.
        draws: False replaces every random draw by a fixed number. A loss that draws one mask for
            all rows, as layers of other libraries do, is then checked for everything else.
        ragged: as in `make_step`: whether masks may hide rows; False compares no masks.

    Raises:
        AssertionError: if the result depends on the split; its message is the report.
        LossError: if the loss breaks its contract or cannot be traced, or the batch has one row.
        ConfigError: if a strategy needs more devices than are available.
    """
    case = build_case(
        loss,
        params,
        batch,
        optimizer=optimizer or optax.sgd(0.1),
        extra=extra,
        rows_interact=rows_interact,
        dims=dims,
        seed=seed,
        draws=draws,
        ragged=ragged,
        make=step or make_step,
    )
    report = check(case, strategies)
    if not report.ok:
        raise AssertionError(report.describe())
    return report


def check(
    case: LossCase,
    strategies: Mapping[str, Layout] | None = None,
    *,
    most: int = 8,
    log: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run all comparisons of a case; steps are compared only if the loss by itself is right.

    Args:
        strategies: by name; by default all that fit.
        most: the largest number of devices in the default strategies.
        log: called with the name of each comparison when it starts, since each takes a while.
    """
    rows, not_compared = [], list(_not_compared(case))
    rows += compare_loss(case, log, not_compared)
    if any(row.verdict == "FAILS" for row in rows):
        not_compared.append("Steps were not compared: the fault in the loss would fail them all.")
        return CheckReport(_describe(case), tuple(rows), tuple(not_compared))
    named = next((row for row in rows if row.verdict == "named"), None)
    chosen = list_layouts(case.rows, case.dims, most=most) if strategies is None else strategies
    rows += compare_steps(case, chosen, log, not_compared, named=named)
    return CheckReport(_describe(case), tuple(rows), tuple(not_compared))


def _not_compared(case: LossCase) -> Iterator[str]:
    """Yield a sentence for each kind of comparison that is not made, with the reason."""
    if case.mask_error:
        yield f"Masks, padding and ragged batches were not compared: {case.mask_error}"
    if case.rows_interact != "never":
        yield (
            f"Other orders of the rows and splits into slices were not compared: the rows "
            f'interact, by rows_interact="{case.rows_interact}".'
        )
    if not case.draws:
        yield "Random draws were not compared (draws=False, --without-draws): all draws are fixed."


def _describe(case: LossCase) -> str:
    leaves = jax.tree.leaves(case.params)
    size = sum(leaf.size for leaf in leaves)
    facts = [case.source, f"{case.rows} rows", f"{len(leaves)} parameters of {size:,} numbers"]
    return "; ".join(x for x in facts if x) + "; against one device with the full batch."


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
    for compared in iter_variants(Steps(case), strategies, not_compared):
        log(compared.name)
        try:
            yield compare_variant(compared, named)
        except (ShardingError, ConfigError) as error:
            not_compared.append(f"{compared.name} was not compared: {str(error).split('. ')[0]}.")
        except Exception as error:
            if not is_raised_by_loss(error):
                raise
            fewer, raised = len(compared.parts[0]["mask"]), describe_error(error)
            found = cause("fixed number of rows", rows=case.rows, fewer=fewer, raised=raised)
            yield Comparison.explained(compared.name, found, None)


def iter_variants(
    steps: Steps, strategies: Mapping[str, Layout], not_compared: list[str]
) -> Iterator[SplitStep]:
    """Yield a step for each way to split the batch; those that do not fit go to `not_compared`."""
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


def compare_variant(compared: SplitStep, named: Comparison | None = None) -> Comparison:
    """Compare a variant with one device, and explain a failure; `named` as in `compare_steps`."""
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
    if row.verdict != "FAILS" or row.cause == "rounding":
        return row
    found = explain_step(compared)
    return dataclasses.replace(row, why=found.why, cause=found.name)
