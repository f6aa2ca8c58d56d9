"""Diagnosis of a step that differs from that of one device, from the size of the difference."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.case import LossCase
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import (
    StepResult,
    compare_results,
    distance,
    fit_multiple,
    flatten,
    named_arrays,
    relative_difference,
    state_tree_of,
)
from jtrain.testing.report import is_finite
from jtrain.testing.row_sums import CompiledRowSums, RowSums, add_sums

EXPLAINED = 1e-5  # larger differences are diagnosed: float32 rounding causes none so large
MATCH = 1e-4  # relative tolerance of an explanation: above rounding, below the difference
SMALL = 2.0**-20  # factor of the loss: far below any clipping threshold
SEES = 1e-4  # relative change in the loss of a position that depends on a token
ENDS = ((0, "first"), (-1, "last"))

# (name of a state tree, the leaves of a state) -> the numbers of the tree as one vector
Part: TypeAlias = Callable[[str, dict[str, np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """The result of a step under a split, the expected result, and experiments on the step."""

    case: LossCase
    batch: Batch
    actual: StepResult
    expected: StepResult
    start: dict  # the state before the step, as in StepResult
    parts: Sequence[Batch]  # as the step split the batch; one if it did not
    noun: str  # microbatch, device
    distance_without_draws: Callable[[], float]  # distance of both results with all draws fixed
    # Both results, for the loss times a factor.
    scale_loss: Callable[[float], tuple[StepResult, StepResult]]
    explain_time: Callable[[], Cause | None]  # the fault along a split sequence

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.parts)

    def cause(self, row: str, /, **facts: object) -> Cause:
        """Return a cause of the table; the number and the name of the parts are known."""
        nouns = "microbatches" if self.noun == "microbatch" else f"{self.noun}s"
        return cause(row, count=self.count, part=self.noun, parts=nouns, **facts)


def explain_step(failed: FailedSplit) -> Cause:
    """Return why a step differs from that of one device."""
    actual, expected = failed.actual.calls, failed.expected.calls
    if found := _explain_nonfinite(failed):
        return found
    if actual != expected:
        return failed.cause("optimizer per part", actual=actual, expected=expected)
    if failed.distance_without_draws() <= EXPLAINED:
        return failed.cause("key of the part")
    for explain in (_explain_loss, _explain_gradient, _explain_metrics, _explain_state):
        if found := explain(failed):
            return found
    return failed.cause("unexplained")


def _explain_nonfinite(failed: FailedSplit) -> Cause | None:
    """Return a cause if only one of the two steps is finite."""
    if failed.actual.calls > 0 and is_finite(failed.actual) == is_finite(failed.expected):
        return None
    rows = CompiledRowSums(failed.case)
    empty = [i for i, part in enumerate(failed.parts) if not part["mask"].any()]
    real = [part for part in failed.parts if part["mask"].any()]
    if empty and all(math.isfinite(add_sums([rows(part)], failed.case).loss) for part in real):
        return failed.cause("empty slice (step)", index=empty[0])
    return failed.cause("not finite (step)")


def _explain_loss(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong loss."""
    actual, expected = failed.actual.loss, failed.expected.loss
    if relative_difference(actual, expected) <= EXPLAINED:
        return None
    if found := failed.explain_time():
        return found
    ratio = actual / expected if expected else math.nan
    if failed.count > 1:
        rows = CompiledRowSums(failed.case)
        part_sums, whole = [rows(part) for part in failed.parts], rows(failed.batch)
        what = f"loss, {actual:.7g},"
        values = [add_sums([sums], failed.case).loss for sums in part_sums]
        shares = [_share(sums, whole) for sums in part_sums]
        for row, value, facts in _wrong_sums(np.array(values), np.array(shares), expected):
            if _is_near(actual, float(value)):
                return failed.cause(row, what=what, **facts)
        size = len(failed.batch["mask"])
        if _is_near(actual, sum(sum(sums.contributions) for sums in part_sums) / size):
            return _padded_size(failed, ratio, "loss")
        if found := _explain_terms(part_sums, whole, failed):
            return found
    return _explain_ratio(ratio, "loss", failed)


def _share(sums: RowSums, whole: RowSums) -> float:
    """Return what a part adds to the loss of all rows."""
    return sum(t / w for t, w in zip(sums.contributions, whole.weights, strict=True) if w)


def _wrong_sums(
    values: np.ndarray, shares: np.ndarray, expected: float | np.ndarray
) -> Iterator[tuple[str, np.ndarray, dict[str, object]]]:
    """Yield the row of the table, the value and the facts of each wrong way to sum over parts.

    Args:
        values: the loss, or the gradient, of each part divided by its own weight: n ...
        shares: the same, divided by the weight of all rows.
        expected: the right value.
    """
    finite = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    yield "mean of means (step)", finite.sum(0) / max(len(values), 1), {}
    yield "double sum", len(values) * np.asarray(expected), {}
    yield "sum of means", finite.sum(0), {}
    for index, which in ENDS:
        for value in (values[index], shares[index]):
            yield "missing sum", value, {"which": which}


def _explain_terms(
    part_sums: Sequence[RowSums], whole: RowSums, failed: FailedSplit
) -> Cause | None:
    """Return a cause if one of several terms is weighted differently from the others."""
    n, actual, expected = failed.count, failed.actual.loss, failed.expected.loss
    part_means = [_means_of(sums) for sums in part_sums]
    for index, mean in enumerate(_means_of(whole)):
        wrong = {
            f"{n} times": n * mean,
            f"once per {failed.noun} the mean of": sum(part[index] for part in part_means),
            f"1/{n} of": mean / n,
        }
        for times, value in wrong.items() if index else ():
            if _is_near(actual, expected + value - mean):
                return failed.cause("term by parts", actual=actual, times=times, index=index)
    return None


def _means_of(sums: RowSums) -> list[float]:
    """Return coefficient times total / weight of each term."""
    pairs = zip(sums.contributions, sums.weights, strict=True)
    return [total / weight if weight else 0.0 for total, weight in pairs]


def _explain_gradient(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong gradient, whether the loss is right or unexplained."""
    actual, expected = flatten(failed.actual.gradient), failed.expected.gradient
    if distance(failed.actual.gradient, expected).by <= EXPLAINED:
        return None
    times, residual = fit_multiple(failed.actual.gradient, expected)
    known = residual < MATCH and abs(times - 1) > MATCH
    if known and (found := _explain_ratio(times, "gradient", failed)):
        return found
    if failed.count > 1:
        rows = CompiledRowSums(failed.case)
        weights = rows.weights(failed.batch)
        values = np.stack([flatten(rows(part).gradient) for part in failed.parts])
        shares = np.stack([flatten(rows(part, weights).gradient) for part in failed.parts])
        for row, value, facts in _wrong_sums(values, shares, flatten(expected)):
            size = max(float(np.linalg.norm(value)), 1e-30)
            if np.linalg.norm(actual - value) <= MATCH * size:
                return failed.cause(row, what="gradient", **facts)
    small, right = failed.scale_loss(SMALL)
    if distance(small.gradient, right.gradient).by <= MATCH:
        return failed.cause("clip before the sum")
    off = np.linalg.norm(flatten(small.gradient) / SMALL - actual)
    if off > MATCH * np.linalg.norm(actual):
        return failed.cause("function before the sum")
    return None


def _explain_ratio(times: float, what: str, failed: FailedSplit) -> Cause | None:
    """Return a cause if a value is a known multiple of the right one."""
    n, mask = failed.count, failed.batch["mask"]
    if n > 1 and _is_near(times, n):
        return failed.cause("double sum", what=what)
    if n > 1 and _is_near(times, 1 / n):
        return failed.cause("divided twice", what=what)
    if _is_near(times, mask.sum() / len(mask)):
        return _padded_size(failed, times, what)
    power = math.log2(abs(times)) if times else 0.0
    if abs(power) > 4 and abs(power - round(power)) < MATCH:
        return failed.cause("loss scale", what=what, power=round(power))
    return None


def _padded_size(failed: FailedSplit, times: float, what: str) -> Cause:
    mask = failed.batch["mask"]
    return failed.cause(
        "padded size (step)", what=what, times=times, real=mask.sum(), rows=len(mask)
    )


def _explain_metrics(failed: FailedSplit) -> Cause | None:
    """Return the cause for a wrong metric."""
    for name, expected in failed.expected.metrics.items():
        actual = failed.actual.metrics.get(name, math.nan)
        if relative_difference(actual, expected) <= EXPLAINED:
            continue
        rows = CompiledRowSums(failed.case)
        values = [add_sums([rows(part)], failed.case).metrics[name] for part in failed.parts]
        if failed.count > 1 and _is_near(actual, float(np.nanmean(values))):
            return failed.cause("metric: mean of means", metric=name, actual=actual)
        if failed.count > 1 and (_is_near(actual, values[0]) or _is_near(actual, values[-1])):
            return failed.cause("metric: missing sum", metric=name)
        return failed.cause("metric", metric=name, actual=actual, expected=expected)
    return None


def _is_near(actual: float, value: float | int) -> bool:
    """Return whether a number agrees with the one that an explanation predicts."""
    return bool(math.isfinite(value) and abs(actual - value) <= MATCH * max(abs(value), 1e-12))


# The next state, after a right loss and gradient.


def _explain_state(failed: FailedSplit) -> Cause | None:
    """Return why the state differs; None if it does not, or if loss or gradient differ already."""
    distances = compare_results(failed.actual, failed.expected)
    if max(distances.loss, distances.gradient.by) > EXPLAINED:
        return None
    actual, expected, before = (
        named_arrays(tree) for tree in (failed.actual.state, failed.expected.state, failed.start)
    )
    far = lambda n: n not in actual or distance(actual[n], expected[n]).by > EXPLAINED
    off = [name for name in expected if far(name)]
    if not off:
        return None
    parameters = tuple(failed.expected.leaves())

    def part(where: str, tree: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([tree[f"{where}/{p}" if p else where].ravel() for p in parameters])

    def multiple(where: str, of: np.ndarray) -> tuple[float, float]:
        return fit_multiple(part(where, actual) - part(where, expected), of)

    wrong = {state_tree_of(name, parameters) for name in off}
    if "params" in wrong:
        factor, residual = multiple("params", part("params", before))
        if residual < 10 * MATCH:
            return failed.cause("decay per part", factor=factor)
        return failed.cause("update")
    step = part("params", expected) - part("params", before)
    complete = {w for w in wrong if all((f"{w}/{p}" if p else w) in expected for p in parameters)}
    for where in sorted(complete):
        factor, residual = multiple(where, step)
        if residual < 100 * MATCH:  # it lags behind the parameters
            return failed.cause("stale average", leaf=where, factor=-factor)
    return _explain_extra(failed, off) or failed.cause("state", leaf=off[0])


def _explain_extra(failed: FailedSplit, off: list[str]) -> Cause | None:
    """Return a cause if running statistics are those of one part."""
    extra = sorted(name for name in off if name.startswith("extra"))
    if not extra or failed.count == 1:
        return None
    rows, actual = CompiledRowSums(failed.case), named_arrays(failed.actual.state)
    for index, which in ENDS:
        single = named_arrays(add_sums([rows(failed.parts[index])], failed.case).state)
        if all(distance(actual[name], single[name]).by <= MATCH for name in extra):
            return failed.cause("statistics of one part", leaf=extra[0], which=which)
    return None


# Sequences that are split.


def explain_time_split(
    batch: Batch,
    parts: int,
    actual: Callable[[Batch], StepResult],
    expected: Callable[[Batch], StepResult],
) -> Cause | None:
    """Return why a loss over `tokens` b t+1 of `length` b differs if t is split; None if unknown.

    For positions beside the first border of two parts, and for the last position, the tokens that
    change the loss are compared between split sequences (`actual`) and one device (`expected`).
    """
    if parts < 2 or not {"tokens", "length"} <= set(batch):
        return None
    time = batch["tokens"].shape[1] - 1
    border = time // parts  # the first position of the second part
    if time % parts or border < 2:
        return None

    def sum_before(run: Callable[[Batch], StepResult], length: int, changed: int | None) -> float:
        """Return the sum of the losses of the positions before `length`."""
        if not length:
            return 0.0
        tokens = batch["tokens"].copy()
        if changed is not None:
            tokens[:, changed] = np.roll(tokens[:, changed], 1)
        lengths = np.full_like(batch["length"], length)
        return run({**batch, "tokens": tokens, "length": lengths}).loss * length

    def sees(run: Callable[[Batch], StepResult], position: int, token: int) -> bool:
        """Return whether the loss of a position changes with a token."""
        changed, same = (
            sum_before(run, position + 1, x) - sum_before(run, position, x) for x in (token, None)
        )
        return relative_difference(changed, same) > SEES

    tokens = sorted({0, border - 1, border, border + 1, time - 1})
    positions = (border - 2, border - 1, border, time - 1)
    for position, token in itertools.product(positions, tokens):
        if token == position + 1:  # the target of the position
            continue
        does, should = sees(actual, position, token), sees(expected, position, token)
        if does != should:
            verbs = ("sees", "does not") if does else ("does not see", "does")
            facts = dict(zip(("does", "should"), verbs, strict=True))
            return cause("causal mask", border=border, position=position, token=token, **facts)
    before = [sum_before(run, border, None) for run in (actual, expected)]
    return None if relative_difference(*before) > SEES else cause("positions", border=border)
