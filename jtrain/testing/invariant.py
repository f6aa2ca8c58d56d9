"""Whether a loss and its step give one result however a batch is split."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from jtrain.core.step import make_step
from jtrain.core.types import Batch, Couples, Dims, Extra, Params
from jtrain.testing.case import Loss, LossCase, MakeStep, PlacedLoss, subject
from jtrain.testing.layouts import Layout, fitting
from jtrain.testing.loss_checks import of_loss
from jtrain.testing.report import CheckReport
from jtrain.testing.rounding import in_bfloat16
from jtrain.testing.steps import of_steps


def assert_invariant(
    loss: Loss | PlacedLoss,
    params: Params,
    batch: Batch,
    optimizer: optax.GradientTransformation | None = None,
    step: MakeStep | None = None,
    strategies: Mapping[str, Layout] | None = None,
    *,
    extra: Extra = (),
    couples: Couples = "nothing",
    dims: Mapping[str, Dims] = {},
    seed: int = 0,
    draws: bool = True,
    ragged: bool = True,
    compute: Any = None,
) -> CheckReport:
    """The report of a loss whose result does not depend on how the batch is split.

    Args:
        loss: in any form that `jtrain.make_step` takes; or `placed(build)`, where `build(place)`
            gives it for a placement.
        batch: arrays of at least 2 rows, 8 better; `row` and `mask` are added where they lack.
        optimizer: who takes the step; plain descent by default.
        step: what makes the step, called as `jtrain.make_step` is, if it is one of your own.
        strategies: values of `jtrain.parallel`, or strategies, by name; by default all that fit
            the rows and the devices at hand.
        extra: what the loss takes that is not differentiated.
        couples: as of `make_step`: what rows do by declaration is not compared.
        dims: the names of the dims of parameters, by the parameters' own.
        seed: of the key of the run.
        draws: False replaces every random draw by a fixed number, so that a loss which draws one
            mask for all rows that it sees, as layers of other libraries do, is checked for the
            rest.
        ragged: as of `make_step`: whether masks may hide rows; False compares no masks.
        compute: as of `make_step`: a narrow type that the loss is to be computed in. The loss in
            bfloat16 is then compared with itself in float64.

    Raises:
        AssertionError: with the table and what is wrong, if it does depend on it.
        LossError: if the loss keeps no contract or cannot be traced, or the batch has one row.
        ConfigError: if a strategy needs more devices than there are.
    """
    of = subject(
        loss,
        params,
        batch,
        optimizer=optimizer or optax.sgd(0.1),
        extra=extra,
        couples=couples,
        dims=dims,
        seed=seed,
        draws=draws,
        ragged=ragged,
        compute=compute,
        make=step or make_step,
    )
    report = check(of, strategies)
    if not report.ok:
        raise AssertionError(report.told())
    return report


def check(
    of: LossCase,
    strategies: Mapping[str, Layout] | None = None,
    *,
    most: int = 8,
    tell: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """All comparisons of a subject. What a step does is not looked at where its loss is wrong.

    Args:
        strategies: by name; by default all that fit.
        most: the devices that are taken by default.
        tell: gets a word about each comparison as it begins, for it takes a while.
    """
    rows, left = [], list(_left(of))
    rows += of_loss(of, tell, left)
    if any(row.verdict == "FAILS" for row in rows):
        left.append("Steps were not compared: they would fail for what is wrong with the loss.")
        return CheckReport(_what(of), tuple(rows), tuple(left))
    named = next((row for row in rows if row.verdict == "named"), None)
    if of.compute is not None:
        tell("bfloat16")
    narrow = in_bfloat16(of, left)
    rows += [narrow] if narrow else []
    chosen = fitting(of.rows, of.dims, most=most) if strategies is None else strategies
    rows += of_steps(of, chosen, tell, left, named=named)
    return CheckReport(_what(of), tuple(rows), tuple(left))


def _left(of: LossCase) -> Iterator[str]:
    """What is not compared, and why."""
    if of.masks:
        yield f"Masks, padding and ragged batches were not compared: {of.masks}"
    if of.couples != "nothing":
        yield (
            f"Other orders of the rows and splits into slices were not compared: the rows meet, by "
            f'couples="{of.couples}".'
        )
    if not of.draws:
        yield "What is drawn was not compared (draws=False, --without-draws): all draws are fixed."


def _what(of: LossCase) -> str:
    leaves = jax.tree.leaves(of.params)
    size = sum(leaf.size for leaf in leaves)
    said = [of.said, f"{of.rows} rows", f"{len(leaves)} parameters of {size:,} numbers"]
    return "; ".join(x for x in said if x) + "; against one device that takes the batch whole."
