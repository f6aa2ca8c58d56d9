"""Whether a loss and its step give one result however a batch is split."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from jtrain.step import make_step
from jtrain.testing.eager import eager
from jtrain.testing.layouts import Layout, fitting
from jtrain.testing.report import Report, Row
from jtrain.testing.result import Distances, distances
from jtrain.testing.rounding import in_bfloat16
from jtrain.testing.splits import splits
from jtrain.testing.steps import of_steps
from jtrain.testing.subject import Loss, MakeStep, Placed, Subject, subject
from jtrain.testing.sums import OfRows, together
from jtrain.testing.verdict import DOUBLE, SINGLE, judged
from jtrain.testing.walk import without_draws
from jtrain.testing.why_rows import Cause, cause_of_split
from jtrain.testing.widened import if_seen
from jtrain.types import Batch, Couples, Dims, Extra, Params


def assert_invariant(
    loss: Loss | Placed,
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
) -> Report:
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

    Raises:
        AssertionError: with the table and what is wrong, if it does depend on it.
        LossError: if the loss keeps no contract, or the batch has one row.
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
        make=step or make_step,
    )
    report = check(of, strategies)
    if not report.ok:
        raise AssertionError(report.told())
    return report


def check(
    of: Subject,
    strategies: Mapping[str, Layout] | None = None,
    *,
    most: int = 8,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """All comparisons of a subject. What a step does is not looked at where its loss is wrong.

    Args:
        strategies: by name; by default all that fit.
        most: the devices that are taken by default.
        tell: gets a word about each comparison as it begins, for it takes a while.
    """
    rows, left = [], list(_left(of))
    for row in of_loss(of, tell):
        rows.append(row)
        if row.verdict == "FAILS" and row.check == "eager":
            break  # no function of its arguments: all else would fail for this
    if any(row.verdict == "FAILS" for row in rows):
        left.append("Steps were not compared: they would fail for what is wrong with the loss.")
        return Report(_what(of), tuple(rows), tuple(left))
    if any(row.verdict == "named" for row in rows):
        build = of.loss.build
        of = dataclasses.replace(of, loss=Placed(lambda place: without_draws(build(place))))
    tell("bfloat16")
    narrow = in_bfloat16(of, left)
    rows += [narrow] if narrow else []
    chosen = fitting(of.rows, of.dims, most=most) if strategies is None else strategies
    rows += of_steps(of, chosen, tell, left)
    return Report(_what(of), tuple(rows), tuple(left))


def of_loss(of: Subject, tell: Callable[[str], None] = lambda line: None) -> Iterator[Row]:
    """The loss by itself: eager, and its sums."""
    single, double = OfRows(of), OfRows(of, double=True)
    displaced: Cause | None = None
    tell("eager")
    yield eager(single, double)
    for split in splits(of.batch, hides=not of.masks, meets=of.couples != "nothing"):
        tell(split.name)

        def apart(rows: OfRows, split: Any = split) -> Distances:
            parts, whole = split.parts, [split.whole]
            return distances(together(rows, parts)[0], together(rows, whole)[0])

        near, exact = apart(single), if_seen(lambda apart=apart: apart(double))
        rows, tolerance = (double, DOUBLE) if exact else (single, SINGLE)
        why = lambda split=split, rows=rows, t=tolerance: cause_of_split(split, rows, t)
        if displaced:  # a split moves rows, too
            why = lambda displaced=displaced: displaced
        row = judged(split.name, near, exact, why)
        if split.kind == "order" and row.why:
            displaced = Cause(row.cause, row.why, fault=row.verdict == "FAILS")
        yield row


def _left(of: Subject) -> Iterator[str]:
    """What is not compared, and why."""
    if of.masks:
        yield f"Masks, padding and ragged batches were not compared: {of.masks}"
    if of.couples != "nothing":
        yield (f'Splits into slices were not compared: the rows meet, by couples="{of.couples}".')


def _what(of: Subject) -> str:
    leaves = jax.tree.leaves(of.params)
    size = sum(leaf.size for leaf in leaves)
    said = [of.said, f"{of.rows} rows", f"{len(leaves)} parameters of {size:,} numbers"]
    return "; ".join(x for x in said if x) + "; against one device that takes the batch whole."
