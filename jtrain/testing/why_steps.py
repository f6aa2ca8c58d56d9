"""Causes for a step that differs from that of one device, from the size of the difference."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jtrain.testing.compare import distance, fit_multiple, flatten
from jtrain.testing.failed_step import MATCH, FailedSplit, is_near
from jtrain.testing.result import Cause
from jtrain.testing.row_sums import CompiledRowSums, RowSums, add_sums
from jtrain.testing.verdict import is_finite
from jtrain.testing.why_state import explain_state

SMALL = 2.0**-20  # factor of the loss: far below any clipping threshold


def explain_step(failed: FailedSplit) -> Cause:
    """Return why a step differs from that of one device."""
    for explain in (
        _explain_nonfinite,
        _explain_calls,
        _explain_draws,
        _explain_loss,
        _explain_gradient,
        _explain_metrics,
        explain_state,
    ):
        if found := explain(failed):
            return found
    return Cause(
        "unexplained",
        f"the step differs from that of one device, with {failed.count} {failed.nouns}, and no "
        f"known explanation fits: compare the worst leaf.",
    )


def _explain_calls(failed: FailedSplit) -> Cause | None:
    """Return a cause if the optimizer is called too often."""
    actual, expected = failed.actual.calls, failed.expected.calls
    if actual == expected:
        return None
    return Cause(
        "optimizer per part",
        f"the optimizer is called {actual} times in a step and {expected} on one device: once for "
        f"each {failed.noun}, before their gradients are summed. Moments, decay and clipping then "
        f"act {actual} times. Sum first, then update once.",
    )


def _explain_nonfinite(failed: FailedSplit) -> Cause | None:
    """Return a cause if only one of the two steps is finite."""
    if failed.actual.calls > 0 and is_finite(failed.actual) == is_finite(failed.expected):
        return None
    rows, noun = CompiledRowSums(failed.case), failed.noun
    empty = [i for i, part in enumerate(failed.parts) if not part["mask"].any()]
    real = [part for part in failed.parts if part["mask"].any()]
    if empty and all(math.isfinite(add_sums([rows(part)], failed.case).loss) for part in real):
        return Cause(
            "empty slice",
            f"loss or gradient is not finite, so the step is skipped, and {noun} {empty[0]} of "
            f"{failed.count} has no row that counts: it divides by its own count of 0. Divide by "
            f"the weight of all rows, after the sum over {failed.nouns}.",
        )
    return Cause(
        "not finite",
        f"loss or gradient is not finite with {failed.count} {failed.nouns}, so the step is "
        f"skipped, and one device takes it: a sum overflows in one of the two. `jtrain run CONFIG "
        f"--find-nan` reports the operation.",
    )


def _explain_draws(failed: FailedSplit) -> Cause | None:
    """Return a cause if the step agrees without random draws."""
    if failed.distance_without_draws() > failed.tolerance:
        return None
    return Cause(
        "key of the part",
        f"without random draws nothing differs: the key depends on the {failed.noun} (axis_index, "
        f"or the number of a microbatch, folded in). Use the same key for all {failed.nouns} of a "
        f"step, and draw for each row by `jt.row_keys(rng, batch)`.",
    )


def _explain_loss(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong loss."""
    actual, expected, n = failed.actual.loss, failed.expected.loss, failed.count
    if distance(np.float64(actual), np.float64(expected)).by <= failed.tolerance:
        return None
    if found := failed.explain_time():
        return found
    rows = CompiledRowSums(failed.case)
    part_sums = [rows(part) for part in failed.parts] if n > 1 else []
    if n > 1:
        values = [add_sums([sums], failed.case).loss for sums in part_sums]
        for name, value, why in _wrong_losses(values, part_sums, rows(failed.batch), failed):
            if is_near(actual, value):
                return Cause(name, f"the loss, {actual:.7g}, is {why}")
    if n > 1 and (found := _explain_terms(part_sums, rows(failed.batch), failed)):
        return found
    if found := _explain_ratio(actual / expected if expected else math.nan, "loss", failed):
        return found
    return None


def _explain_terms(
    part_sums: Sequence[RowSums], whole: RowSums, failed: FailedSplit
) -> Cause | None:
    """Return a cause if one of several terms is weighted differently from the others."""
    n, actual, expected, noun = failed.count, failed.actual.loss, failed.expected.loss, failed.noun
    part_means = [_means_of(sums) for sums in part_sums]
    for index, share in enumerate(_means_of(whole)):
        added_up = sum(part[index] for part in part_means)
        for value, times in ((n * share, f"{n} times"), (added_up, f"once per {noun} the mean of")):
            if index and is_near(actual, expected + value - share):
                return Cause(
                    "term by parts",
                    f"the loss, {actual:.7g}, has {times} term {index} of the loss, with {n} "
                    f"{failed.nouns}: the term is added once for each {noun}. A term is a Mean "
                    f"with its own weight, divided by the weight of all rows.",
                )
        if index and is_near(actual, expected + share / n - share):
            return Cause(
                "term by parts",
                f"the loss, {actual:.7g}, has 1/{n} of term {index} of the loss, with {n} "
                f"{failed.nouns}: the term is divided by their number. A term is divided by its "
                f"own weight.",
            )
    return None


def _means_of(sums: RowSums) -> list[float]:
    """Return coefficient times total / weight of each term."""
    pairs = zip(sums.contributions, sums.weights, strict=True)
    return [total / weight if weight else 0.0 for total, weight in pairs]


def _wrong_losses(
    values: Sequence[float], part_sums: Sequence[RowSums], whole: RowSums, failed: FailedSplit
) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and description of each wrong way to sum losses."""
    n, noun = failed.count, failed.noun
    finite = [v for v in values if math.isfinite(v)]
    yield (
        "mean of means",
        sum(finite) / n,
        f"the mean of the {n} {failed.nouns}' own means, in which rows of a smaller {noun} count "
        f"more. Sum totals and weights over all {failed.nouns}, then divide.",
    )
    yield (
        "double sum",
        n * failed.expected.loss,
        f"{n} times that of one device: a sum over {failed.nouns} is summed again (a second psum).",
    )
    yield (
        "sum of means",
        sum(finite),
        f"the sum of the {n} {failed.nouns}' own means: divide by the weight of all rows, once.",
    )
    padded = sum(sum(sums.contributions) for sums in part_sums) / len(failed.batch["mask"])
    yield (
        "padded size",
        padded,
        f"the total divided by all {len(failed.batch['mask'])} rows, including hidden rows, and "
        f"not by the weight of the rows that count.",
    )
    for index, word in ((0, "first"), (-1, "last")):
        yield (
            "missing sum",
            values[index],
            f"that of the {word} {noun} alone: nothing is summed over {failed.nouns} (a psum is "
            f"missing).",
        )
        share = sum(
            t / w for t, w in zip(part_sums[index].contributions, whole.weights, strict=True) if w
        )
        yield (
            "missing sum",
            share,
            f"the share of the {word} {noun} alone: nothing is summed over {failed.nouns} (a psum "
            f"is missing).",
        )


def _explain_gradient(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong gradient, whether the loss is right or unexplained."""
    actual, expected, n = failed.actual.gradient, failed.expected.gradient, failed.count
    if distance(actual, expected).by <= failed.tolerance:
        return None
    times, residual = fit_multiple(actual, expected)
    if (
        residual < MATCH
        and abs(times - 1) > MATCH
        and (found := _explain_ratio(times, "gradient", failed))
    ):
        return found
    if n > 1:
        rows = CompiledRowSums(failed.case)
        weights = rows.weights(failed.batch)
        part_sums = [rows(part) for part in failed.parts]
        shares = [rows(part, weights).gradient for part in failed.parts]
        means = [sums.gradient for sums in part_sums]
        for name, gradient, why in _wrong_gradients(means, shares, failed):
            if np.linalg.norm(flatten(actual) - gradient) <= MATCH * max(
                np.linalg.norm(gradient), 1e-30
            ):
                return Cause(name, f"the gradient is {why}")
    small, right = failed.scale_loss(SMALL)
    if distance(small.gradient, right.gradient).by <= MATCH:
        return Cause(
            "clip before the sum",
            f"the gradient of the loss times 1e-6 is right, and that of the loss itself is not: an "
            f"operation that depends on its size, such as clipping, acts on each {failed.noun} "
            f"before they are summed. Sum first, then clip: in the optimizer.",
        )
    if np.linalg.norm(flatten(small.gradient) / SMALL - flatten(actual)) > MATCH * np.linalg.norm(
        flatten(actual)
    ):
        return Cause(
            "function before the sum",
            f"the gradient of the loss times 1e-6 is not 1e-6 of its gradient: a nonlinear "
            f"operation (a sign, a division by a norm, a cast to few bits) acts on each "
            f"{failed.noun} before they are summed. Sum first; nonlinear operations belong in the "
            f"optimizer.",
        )
    return None


def _wrong_gradients(
    means: Sequence, shares: Sequence, failed: FailedSplit
) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield name, value and description of each wrong way to sum gradients."""
    n, noun = failed.count, failed.noun
    parts = [np.nan_to_num(flatten(gradient)) for gradient in means]
    yield (
        "mean of means",
        np.sum(parts, 0) / n,
        f"the mean of the {n} {failed.nouns}' own gradients, each divided by its own rows: rows of "
        f"a smaller {noun} count more. Divide by the weight of all rows.",
    )
    yield (
        "sum of means",
        np.sum(parts, 0),
        f"the sum of the {n} {failed.nouns}' own mean gradients.",
    )
    for index, word in ((0, "first"), (-1, "last")):
        for gradient in (parts[index], flatten(shares[index])):
            yield (
                "missing sum",
                gradient,
                f"that of the {word} {noun} alone: nothing is summed over {failed.nouns} (a psum "
                f"is missing, or one overwrites the other).",
            )


def _explain_ratio(times: float, what: str, failed: FailedSplit) -> Cause | None:
    """Return a cause if a value is a known multiple of the right one."""
    n, mask = failed.count, failed.batch["mask"]
    close = lambda x: is_near(times, x)
    if n > 1 and close(n):
        return Cause(
            "double sum",
            f"the {what} is {n} times that of one device, with {n} {failed.nouns}: a sum over them "
            f"is summed again (a second psum), or the means of all {failed.nouns} are added.",
        )
    if n > 1 and close(1 / n):
        return Cause(
            "divided twice",
            f"the {what} is 1/{n} of that of one device, with {n} {failed.nouns}: it is divided by "
            f"their number after a sum that needs no division (pmean for psum).",
        )
    if close(mask.sum() / len(mask)):
        return Cause(
            "padded size",
            f"the {what} is {times:.6g} = {mask.sum()}/{len(mask)} of that of one device: it is "
            f"divided by all rows and not by those that count. Divide by the weight.",
        )
    power = math.log2(abs(times)) if times else 0.0
    if abs(power) > 4 and abs(power - round(power)) < MATCH:
        return Cause(
            "loss scale",
            f"the {what} is 2^{round(power)} times the right one, for every split: the factor of a "
            f"loss scale is multiplied in and not divided out.",
        )
    return None


def _explain_metrics(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong metric."""
    for name, expected in failed.expected.metrics.items():
        actual = failed.actual.metrics.get(name, math.nan)
        if distance(np.float64(actual), np.float64(expected)).by <= max(
            failed.tolerance, MATCH / 100
        ):
            continue
        rows = CompiledRowSums(failed.case)
        values = [add_sums([rows(part)], failed.case).metrics[name] for part in failed.parts]
        if failed.count > 1 and is_near(actual, float(np.nanmean(values))):
            why = f"the mean of the {failed.count} {failed.nouns}' own values"
            return Cause(
                "metric: mean of means",
                f"the metric {name!r}, {actual:.7g}, is {why}, in which rows of a smaller "
                f"{failed.noun} count more. Sum totals and weights, then divide.",
            )
        if failed.count > 1 and (is_near(actual, values[0]) or is_near(actual, values[-1])):
            return Cause(
                "metric: missing sum", f"the metric {name!r} is that of one {failed.noun}."
            )
        return Cause("metric", f"the metric {name!r} is {actual:.7g} and should be {expected:.7g}.")
    return None
