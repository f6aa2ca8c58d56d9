"""Diagnosis of a step that differs from that of one device, from the size of the difference."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.core.types import Batch
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import (
    StepResult,
    distance,
    fit_multiple,
    flatten,
    named_arrays,
    relative_difference,
    state_tree_of,
)
from jtrain.testing.run_step import SplitStep, init_first_state, state_trees
from jtrain.testing.sums import RowSums, Sums, add_sums

EXPLAINED = 1e-5  # larger differences are diagnosed: float32 rounding causes none so large
MATCH = 1e-4  # relative tolerance of an explanation: above rounding, below the difference
SMALL = 2.0**-20  # factor of the loss: far below any clipping threshold
SEES = 1e-4  # relative change in the loss of a position that depends on a token


def explain_step(failed: SplitStep) -> Cause:
    """Return why a step differs from that of one device."""
    actual, expected = failed.actual, failed.expected
    if actual.calls == 0 or actual.finite != expected.finite:
        return _explain_nonfinite(failed)
    if actual.calls != expected.calls:
        return failed.cause("optimizer per part", actual=actual.calls, expected=expected.calls)
    if _draws(failed) and failed.without_draws().distances().largest <= EXPLAINED:
        return failed.cause("key of the part")
    for explain in (_explain_loss, _explain_gradient, _explain_metrics, _explain_state):
        if found := explain(failed):
            return found
    return failed.cause("unexplained")


def _draws(failed: SplitStep) -> bool:
    equations = equations_in(failed.steps.case.trace.program)
    return any(equation.primitive.name.startswith("random_") for equation in equations)


def _explain_nonfinite(failed: SplitStep) -> Cause:
    """Return why only one of the two steps is finite."""
    results = [add_sums([sums], failed.steps.case) for sums in failed.each_part()]
    empty = [i for i, part in enumerate(failed.parts) if not part["mask"].any()]
    real = [result for i, result in enumerate(results) if i not in empty]
    if empty and all(math.isfinite(result.loss) for result in real):
        return failed.cause("empty slice (step)", index=empty[0])
    return failed.cause("not finite (step)")


def _explain_loss(failed: SplitStep) -> Cause | None:
    """Return the cause for a wrong loss."""
    actual, expected = failed.actual.loss, failed.expected.loss
    if relative_difference(actual, expected) <= EXPLAINED:
        return None
    if found := _explain_time_split(failed):
        return found
    sums, whole = failed.each_part(), Sums(case=failed.steps.case)(failed.steps.batch)
    terms = lambda each: zip(each.contributions, whole.weights, strict=True)
    share = lambda each: sum(total / weight for total, weight in terms(each) if weight)
    values = [[add_sums([each], failed.steps.case).loss] for each in sums]
    found = _explain_sum(failed, "loss", [actual], [expected], values, [[share(x)] for x in sums])
    return found or _explain_terms(sums, whole, failed)


def _explain_terms(sums: Sequence[RowSums], whole: RowSums, failed: SplitStep) -> Cause | None:
    """Return a cause if one of several terms is weighted differently from the others."""
    n, actual, expected = len(failed.parts), failed.actual.loss, failed.expected.loss
    part_means = [_means_of(each) for each in sums]
    for index, mean in enumerate(_means_of(whole)):
        wrong = {
            f"{n} times": n * mean,
            f"once per {failed.noun} the mean of": sum(part[index] for part in part_means),
            f"1/{n} of": mean / n,
        }
        for times, value in wrong.items() if index and n > 1 else ():
            if _is_near(actual, expected + value - mean):
                return failed.cause("term by parts", actual=actual, times=times, index=index)
    return None


def _means_of(sums: RowSums) -> list[float]:
    """Return coefficient times total / weight of each term."""
    pairs = zip(sums.contributions, sums.weights, strict=True)
    return [total / weight if weight else 0.0 for total, weight in pairs]


def _explain_gradient(failed: SplitStep) -> Cause | None:
    """Return the cause for a wrong gradient, whether the loss is right or unexplained."""
    actual, expected = flatten(failed.actual.gradient), flatten(failed.expected.gradient)
    if distance(actual, expected).by <= EXPLAINED:
        return None
    weights = Sums(case=failed.steps.case).weights(failed.steps.batch)
    values, shares = (
        [flatten(each.gradient) for each in failed.each_part(w)] for w in (None, weights)
    )
    if found := _explain_sum(failed, "gradient", actual, expected, values, shares):
        return found
    small = failed.scaled(SMALL)
    if distance(small.actual.gradient, small.expected.gradient).by <= MATCH:
        return failed.cause("clip before the sum")
    if not _is_near(flatten(small.actual.gradient) / SMALL, actual):
        return failed.cause("function before the sum")
    return None


def _explain_metrics(failed: SplitStep) -> Cause | None:
    """Return the cause for a wrong metric."""
    for name, expected in failed.expected.metrics.items():
        actual = failed.actual.metrics.get(name, math.nan)
        if relative_difference(actual, expected) <= EXPLAINED:
            continue
        values = [[add_sums([x], failed.steps.case).metrics[name]] for x in failed.each_part()]
        what = f"metric {name!r}"
        found = _explain_sum(failed, what, [actual], [expected], values, values)
        if found:
            return found._replace(name=f"metric: {found.name}")
        return failed.cause("metric", what=what, actual=actual, expected=expected)
    return None


def _explain_sum(
    failed: SplitStep, what: str, actual: Any, expected: Any, values: list, shares: list
) -> Cause | None:
    """Return a cause if a value is a wrong sum over the parts, or a multiple of the right one.

    Args:
        what: the name of the value.
        actual: the value of the step.
        expected: the right value.
        values: the value of each part, divided by its own weight.
        shares: the same, divided by the weight of all rows.
    """
    for row, wrong, facts in _wrong_sums(failed, *map(np.asarray, (expected, values, shares))):
        if _is_near(np.asarray(actual), wrong) and not _is_near(np.asarray(expected), wrong):
            return failed.cause(row, what=what, **facts)
    times, residual = fit_multiple(np.asarray(actual), np.asarray(expected))
    power = math.log2(abs(times)) if times else 0.0
    if residual < MATCH and abs(power) > 4 and abs(power - round(power)) < MATCH:
        return failed.cause("loss scale", what=what, power=round(power))
    return None


def _wrong_sums(
    failed: SplitStep, expected: np.ndarray, values: np.ndarray, shares: np.ndarray
) -> Iterator[tuple[str, np.ndarray, dict[str, object]]]:
    """Yield the row of the table, the value and the facts of each wrong way to sum over parts."""
    n, mask = len(failed.parts), failed.steps.batch["mask"]
    real, rows = int(mask.sum()), len(mask)
    if n > 1:
        yield "mean of means (step)", np.nan_to_num(values, posinf=0, neginf=0).mean(0), {}
        yield "double sum", n * expected, {}
        yield "divided twice", expected / n, {}
        for index, which in ((0, "first"), (-1, "last")):
            for value in (values[index], shares[index]):
                yield "missing sum", value, {"which": which}
    facts = {"times": real / rows, "real": real, "rows": rows}
    yield "padded size (step)", expected * real / rows, facts


def _is_near(actual: np.ndarray | float, value: np.ndarray | float) -> bool:
    """Return whether numbers agree with those that an explanation predicts."""
    off, size = np.linalg.norm(np.subtract(actual, value)), np.linalg.norm(value)
    return bool(np.isfinite(size) and off <= MATCH * max(float(size), 1e-12))


def _explain_state(failed: SplitStep) -> Cause | None:
    """Return why the next state differs; None if it does not, or if loss or gradient do."""
    distances, start = failed.distances(), state_trees(init_first_state(failed.steps.case))
    if max(distances.loss.by, distances.gradient.by) > EXPLAINED:
        return None
    actual, expected, before = (
        named_arrays(tree) for tree in (failed.actual.state, failed.expected.state, start)
    )
    far = lambda n: n not in actual or distance(actual[n], expected[n]).by > EXPLAINED
    off = [name for name in expected if far(name)]
    if not off:
        return None
    parameters = tuple(named_arrays(failed.expected.gradient))
    leaves = lambda tree: [f"{tree}/{p}" if p else tree for p in parameters]
    vector = lambda arrays, tree: np.concatenate([arrays[leaf].ravel() for leaf in leaves(tree)])

    def multiple(tree: str, of: np.ndarray) -> tuple[float, float]:
        return fit_multiple(vector(actual, tree) - vector(expected, tree), of)

    wrong = {state_tree_of(name, parameters) for name in off}
    if "params" in wrong:
        factor, residual = multiple("params", vector(before, "params"))
        row = "decay per part" if residual < 10 * MATCH else "update"
        return failed.cause(row, factor=factor)
    step = vector(expected, "params") - vector(before, "params")
    for tree in sorted(tree for tree in wrong if set(leaves(tree)) <= expected.keys()):
        factor, residual = multiple(tree, step)
        if residual < 100 * MATCH:  # it lags behind the parameters
            return failed.cause("stale average", leaf=tree, factor=-factor)
    extra = [name for name in off if name.startswith("extra")]
    for index, which in ((0, "first"), (-1, "last")) if len(failed.parts) > 1 else ():
        part = named_arrays(add_sums([failed.each_part()[index]], failed.steps.case).state)
        if extra and all(distance(actual[name], part[name]).by <= MATCH for name in extra):
            return failed.cause("statistics of one part", leaf=min(extra), which=which)
    return failed.cause("state", leaf=off[0])


def _explain_time_split(failed: SplitStep) -> Cause | None:
    """Return why a loss over `tokens` b t+1 of `length` b differs if t is split; None if unknown.

    For positions beside the first border of two parts, and for the last position, the tokens that
    change the loss are compared between split sequences and one device.
    """
    steps, strategy = failed.steps, failed.variant.strategy
    parts, batch = strategy.axes.get("context", 1) if strategy else 1, steps.batch
    if parts < 2 or not {"tokens", "length"} <= set(batch):
        return None
    actual, expected = steps.own(failed.variant), steps.one_device(failed.variant)
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
