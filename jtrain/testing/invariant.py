"""Split invariance: a check that a loss and its step give one result for every split of a batch."""

from collections.abc import Callable, Iterator, Mapping

import jax
import optax

from jtrain.core.step import make_step
from jtrain.core.types import Batch, Dims, Extra, Params, RowsInteract
from jtrain.testing.case import Loss, LossCase, MakeStep, PlacedLoss, build_case
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.report import CheckReport
from jtrain.testing.run_step import Layout, list_layouts
from jtrain.testing.steps import compare_steps


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
