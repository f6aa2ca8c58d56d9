"""What is wrong in a step that differs from one device's, from by how much and where it does."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.compare import distance, flatten, multiple
from jtrain.testing.failed_step import MATCH, FailedSplit, is_near
from jtrain.testing.row_sums import CompiledRowSums, RowSums, added
from jtrain.testing.verdict import is_finite
from jtrain.testing.why_state import cause_of_state

SMALL = 2.0**-20  # times the loss: far below what anything is clipped at


def cause_of_step(case: FailedSplit) -> Cause:
    """Why a step differs from one device's."""
    for explain in (_not_finite, _calls, _draws, _loss, _gradient, _metrics, cause_of_state):
        if found := explain(case):
            return found
    return Cause(
        "unexplained",
        f"it differs from one device, with {case.count} {case.noun}s, and no explanation that was "
        f"tried fits: compare the leaf that is the worst.",
    )


def _calls(case: FailedSplit) -> Cause | None:
    """The optimizer is called too often."""
    got, want = case.got.calls, case.want.calls
    if got == want:
        return None
    return Cause(
        "optimizer per part",
        f"the optimizer is called {got} times in a step and {want} on one device: once for each "
        f"{case.noun}, before their gradients are summed. Moments, decay and clipping then act "
        f"{got} times. Sum first, then update once.",
    )


def _not_finite(case: FailedSplit) -> Cause | None:
    """The step is skipped, or went to pieces, for something in it is no number."""
    if case.got.calls > 0 and is_finite(case.got) == is_finite(case.want):
        return None
    rows, noun = CompiledRowSums(case.of), case.noun
    empty = [i for i, part in enumerate(case.parts) if not part["mask"].any()]
    real = [part for part in case.parts if part["mask"].any()]
    if empty and all(math.isfinite(added([rows(part)], case.of).loss) for part in real):
        return Cause(
            "empty slice",
            f"loss or gradient is no number, so that the step is skipped, and {noun} {empty[0]} of "
            f"{case.count} has no row that counts: it divides by its own count of 0. Divide by the "
            f"weight of all rows, after the sum over {noun}s.",
        )
    return Cause(
        "not finite",
        f"loss or gradient is no number with {case.count} {noun}s, so that the step is skipped, "
        f"and one device takes it: a sum that overflows in one of the two. `jtrain run CONFIG "
        f"--find-nan` says where it comes from.",
    )


def _draws(case: FailedSplit) -> Cause | None:
    """All is well where nothing is drawn."""
    if case.undrawn() > case.tolerance:
        return None
    return Cause(
        "key of the part",
        f"without random draws nothing differs: the key depends on the {case.noun} (axis_index, or "
        f"the number of a microbatch, folded in). The key of a step is the same for all, and what "
        f"a row draws comes from `jt.row_keys(rng, batch)`.",
    )


def _loss(case: FailedSplit) -> Cause | None:
    """The loss itself is another."""
    got, want, n = case.got.loss, case.want.loss, case.count
    if distance(np.float64(got), np.float64(want)).by <= case.tolerance:
        return None
    if found := case.timed():
        return found
    rows = CompiledRowSums(case.of)
    own = [rows(part) for part in case.parts] if n > 1 else []
    if n > 1:
        values = [added([sums], case.of).loss for sums in own]
        for name, value, why in _of_values(values, own, rows(case.batch), case):
            if is_near(got, value):
                return Cause(name, f"the loss that came, {got:.7g}, is {why}")
    if n > 1 and (found := _of_terms(own, rows(case.batch), case)):
        return found
    if found := _ratio(got / want if want else math.nan, "loss", case):
        return found
    return None


def _of_terms(own: Sequence[RowSums], whole: RowSums, case: FailedSplit) -> Cause | None:
    """One term of several is counted otherwise than the others."""
    n, got, want, noun = case.count, case.got.loss, case.want.loss, case.noun
    means = [_means_of(sums) for sums in own]
    for index, share in enumerate(_means_of(whole)):
        added_up = sum(of_part[index] for of_part in means)
        for value, times in ((n * share, f"{n} times"), (added_up, f"of each {noun} the mean of")):
            if index and is_near(got, want + value - share):
                return Cause(
                    "term by parts",
                    f"the loss that came, {got:.7g}, has {times} term {index} of the loss, with "
                    f"{n} {noun}s: it is added once for each of them. A term is a Mean with a "
                    f"weight of its own, divided by the weight of all.",
                )
        if index and is_near(got, want + share / n - share):
            return Cause(
                "term by parts",
                f"the loss that came, {got:.7g}, has 1/{n} of term {index} of the loss, with {n} "
                f"{noun}s: it is divided by their number. Its weight says what it is divided by.",
            )
    return None


def _means_of(sums: RowSums) -> list[float]:
    """Coefficient x total / weight of each term."""
    pairs = zip(sums.contributions, sums.weights, strict=True)
    return [total / weight if weight else 0.0 for total, weight in pairs]


def _of_values(
    values: Sequence[float], own: Sequence[RowSums], whole: RowSums, case: FailedSplit
) -> Iterator[tuple[str, float, str]]:
    """What a wrong sum of losses would give: its name, the number, the words."""
    n, noun = case.count, case.noun
    finite = [v for v in values if math.isfinite(v)]
    yield (
        "mean of means",
        sum(finite) / n,
        f"the mean of the {n} {noun}s' own means, in which rows of a smaller one count more. Sum "
        f"totals and weights over all, then divide.",
    )
    yield (
        "double sum",
        n * case.want.loss,
        f"{n} times that of one device: what is summed over {noun}s already is summed again (a "
        f"second psum).",
    )
    yield (
        "sum of means",
        sum(finite),
        f"the sum of the {n} {noun}s' own means: divide by the weight of all rows, once.",
    )
    padded = sum(sum(sums.contributions) for sums in own) / len(case.batch["mask"])
    yield (
        "padded size",
        padded,
        f"the total divided by all {len(case.batch['mask'])} rows, hidden ones too, and not by the "
        f"weight of those that count.",
    )
    for place, word in ((0, "first"), (-1, "last")):
        yield (
            "missing sum",
            values[place],
            f"that of the {word} {noun} alone: nothing is summed over {noun}s (a psum is missing).",
        )
        share = sum(
            t / w for t, w in zip(own[place].contributions, whole.weights, strict=True) if w
        )
        yield (
            "missing sum",
            share,
            f"the share of the {word} {noun} alone: nothing is summed over {noun}s (a psum is "
            f"missing).",
        )


def _gradient(case: FailedSplit) -> Cause | None:
    """The loss is right, or cannot be explained, and the gradient is another."""
    got, want, n = case.got.gradient, case.want.gradient, case.count
    if distance(got, want).by <= case.tolerance:
        return None
    times, left = multiple(got, want)
    if left < MATCH and abs(times - 1) > MATCH and (found := _ratio(times, "gradient", case)):
        return found
    if n > 1:
        rows = CompiledRowSums(case.of)
        weights = rows.weights(case.batch)
        own = [rows(part) for part in case.parts]
        shares = [rows(part, weights).gradient for part in case.parts]
        means = [sums.gradient for sums in own]
        for name, gradient, why in _of_gradients(means, shares, case):
            if np.linalg.norm(flatten(got) - gradient) <= MATCH * max(
                np.linalg.norm(gradient), 1e-30
            ):
                return Cause(name, f"the gradient that came is {why}")
    small, right = case.times(SMALL)
    if distance(small.gradient, right.gradient).by <= MATCH:
        return Cause(
            "clip before the sum",
            f"the gradient of the loss times 1e-6 is right, and of the loss itself it is not: "
            f"something that depends on its size, clipping, acts on each {case.noun} before they "
            f"are summed. Sum first, then clip: in the optimizer.",
        )
    if np.linalg.norm(flatten(small.gradient) / SMALL - flatten(got)) > MATCH * np.linalg.norm(
        flatten(got)
    ):
        return Cause(
            "function before the sum",
            f"the gradient of the loss times 1e-6 is not 1e-6 of its gradient: something that is "
            f"not linear (a sign, a norm that is divided by, a cast to few bits) acts on each "
            f"{case.noun} before they are summed. Sum first; what comes after belongs in the "
            f"optimizer.",
        )
    return None


def _of_gradients(
    means: Sequence, shares: Sequence, case: FailedSplit
) -> Iterator[tuple[str, np.ndarray, str]]:
    """What a wrong sum of gradients would give: its name, the numbers, the words."""
    n, noun = case.count, case.noun
    parts = [np.nan_to_num(flatten(gradient)) for gradient in means]
    yield (
        "mean of means",
        np.sum(parts, 0) / n,
        f"the mean of the {n} {noun}s' own gradients, each divided by its own rows: rows of a "
        f"smaller one count more. Divide by the weight of all rows.",
    )
    yield "sum of means", np.sum(parts, 0), f"the sum of the {n} {noun}s' own mean gradients."
    for place, word in ((0, "first"), (-1, "last")):
        for gradient in (parts[place], flatten(shares[place])):
            yield (
                "missing sum",
                gradient,
                f"that of the {word} {noun} alone: nothing is summed over {noun}s (a psum is "
                f"missing, or one overwrites the other).",
            )


def _ratio(times: float, what: str, case: FailedSplit) -> Cause | None:
    """A number of times too much."""
    n, noun, mask = case.count, case.noun, case.batch["mask"]
    close = lambda x: is_near(times, x)
    if n > 1 and close(n):
        return Cause(
            "double sum",
            f"the {what} is {n} times that of one device, with {n} {noun}s: what is summed over "
            f"them already is summed again (a second psum), or each one's mean is added.",
        )
    if n > 1 and close(1 / n):
        return Cause(
            "divided twice",
            f"the {what} is 1/{n} of that of one device, with {n} {noun}s: it is divided by their "
            f"number after a sum that needs no division (pmean for psum).",
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
            f"the {what} is 2^{round(power)} times what it should be, whatever the split: the "
            f"factor of a loss scale that is multiplied in and not divided out.",
        )
    return None


def _metrics(case: FailedSplit) -> Cause | None:
    """Only what is told is wrong."""
    for name, want in case.want.metrics.items():
        got = case.got.metrics.get(name, math.nan)
        if distance(np.float64(got), np.float64(want)).by <= max(case.tolerance, MATCH / 100):
            continue
        rows = CompiledRowSums(case.of)
        values = [added([rows(part)], case.of).metrics[name] for part in case.parts]
        if case.count > 1 and is_near(got, float(np.nanmean(values))):
            why = f"the mean of the {case.count} {case.noun}s' own values"
            return Cause(
                "metric: mean of means",
                f"the metric {name!r} that came, {got:.7g}, is {why}, in which rows of a smaller "
                f"one count more. Sum totals and weights, then divide.",
            )
        if case.count > 1 and (is_near(got, values[0]) or is_near(got, values[-1])):
            return Cause("metric: missing sum", f"the metric {name!r} is that of one {case.noun}.")
        return Cause("metric", f"the metric {name!r} is {got:.7g} and should be {want:.7g}.")
    return None
