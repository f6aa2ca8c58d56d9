"""Diagnosis of a step that differs from that of one device, from the size of the difference."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.testing.causes import Cause
from jtrain.testing.compare import StepResult, distance, fit_multiple, flatten, named_arrays
from jtrain.testing.run_step import SplitStep, init_first_state, state_trees
from jtrain.testing.sums import RowSums, add_sums

EXPLAINED = 1e-5  # larger differences are diagnosed: float32 rounding causes none so large
MATCH = 1e-4  # relative tolerance of an explanation: above rounding, below the difference
SMALL = 2.0**-20  # factor of the loss: far below any clipping threshold


def explain_step(failed: SplitStep) -> Cause:
    """Return why a step differs from that of one device."""
    actual, expected = failed.actual, failed.expected
    if actual.calls == 0 or actual.finite != expected.finite:
        return _explain_nonfinite(failed)
    if actual.calls != expected.calls:
        return failed.cause("optimizer per part", actual=actual.calls, expected=expected.calls)
    if _draws(failed) and failed.without_draws().distances().largest <= EXPLAINED:
        return failed.cause("key of the part")
    differs = lambda one: distance(one.actual, one.expected).by > EXPLAINED
    off = {one.what: one for one in _quantities(failed) if differs(one)}
    for what, one in off.items():
        if found := _explain_sum(failed, one):
            is_metric = what.startswith("metric")
            return found._replace(name=f"metric: {found.name}") if is_metric else found
    if not off:
        return _explain_state(failed)
    found = _explain_loss(failed) if "loss" in off else None
    found = found or (_explain_gradient(failed) if "gradient" in off else None)
    found = found or (_explain_leaves(failed) if off.keys() == {"gradient"} else None)
    if found or off.keys() & {"loss", "gradient"}:
        return found or failed.cause("unexplained")
    (what, one), *_ = off.items()
    return failed.cause("metric", what=what, actual=one.actual[0], expected=one.expected[0])


def _draws(failed: SplitStep) -> bool:
    equations = equations_in(failed.steps.case.trace.program)
    return any(equation.primitive.name.startswith("random_") for equation in equations)


def _explain_nonfinite(failed: SplitStep) -> Cause:
    parts = failed.each_part()
    results = [add_sums([sums], failed.steps.case) for sums in parts]
    empty = [i for i, sums in enumerate(parts) if not any(sums.weights)]
    real = [result for i, result in enumerate(results) if i not in empty]
    if empty and all(math.isfinite(result.loss) for result in real):
        return failed.cause("empty slice (step)", index=empty[0])
    return failed.cause("not finite (step)")


class _Quantity(NamedTuple):
    """A number of a step, or the gradient as a vector: that of the step, and the right one."""

    what: str
    actual: np.ndarray
    expected: np.ndarray
    parts: Sequence[np.ndarray]
    """Value of each part, divided by the part's own weight."""
    shares: Sequence[np.ndarray]
    """The same, divided by the weight of all rows."""
    weight: float
    """Weight of all rows; NaN if the loss has several terms."""


def _quantities(failed: SplitStep) -> Iterator[_Quantity]:
    case = failed.steps.case
    weights = failed.steps.sums.weights(failed.steps.batch)
    parts, shares = (
        [add_sums([sums], case) for sums in failed.each_part(divisors)]
        for divisors in (None, weights)
    )

    def quantity(what: str, take: Callable[[StepResult], Any]) -> _Quantity:
        of = lambda results: [np.ravel(take(result)) for result in results]
        actual, expected = of((failed.actual, failed.expected))
        weight = math.nan if len(weights) > 1 or what.startswith("metric") else weights[0]
        return _Quantity(what, actual, expected, of(parts), of(shares), weight)

    yield quantity("loss", lambda x: x.loss)
    yield quantity("gradient", lambda x: flatten(x.gradient))
    for name in failed.expected.metrics:
        yield quantity(f"metric {name!r}", lambda x, name=name: x.metrics.get(name, math.nan))


def _explain_sum(failed: SplitStep, one: _Quantity) -> Cause | None:
    for row, wrong, facts in _wrong_sums(failed, one):
        if _is_near(one.actual, wrong) and not _is_near(one.expected, wrong):
            return failed.cause(row, what=one.what, **facts)
    times, residual = fit_multiple(one.actual, one.expected)
    power = math.log2(abs(times)) if times else 0.0
    if residual < MATCH and abs(power) > 4 and abs(power - round(power)) < MATCH:
        return failed.cause("loss scale", what=one.what, power=round(power))
    return None


def _wrong_sums(
    failed: SplitStep, one: _Quantity
) -> Iterator[tuple[str, np.ndarray, dict[str, object]]]:
    """Yield the row of the table, the value and the facts of each wrong way to sum over parts."""
    n, mask = len(failed.parts), failed.steps.batch["mask"]
    real, rows = int(mask.sum()), len(mask)
    if n > 1:
        yield "mean of means (step)", np.nan_to_num(one.parts, posinf=0, neginf=0).mean(0), {}
        yield "double sum", n * one.expected, {}
        yield "divided twice", one.expected / n, {}
        for index, which in ((0, "first"), (-1, "last")):
            for value in (one.parts[index], one.shares[index]):
                yield "missing sum", value, {"which": which}
    facts = {"times": real / rows, "real": real, "rows": rows}
    yield "padded size (step)", one.expected * real / rows, facts
    row = "clamped weight" if one.weight < 1 else "sum as a mean (step)"
    yield row, one.expected * one.weight, {"weight": one.weight}


def _is_near(actual: np.ndarray | float, value: np.ndarray | float) -> bool:
    off, size = np.linalg.norm(np.subtract(actual, value)), np.linalg.norm(value)
    return bool(np.isfinite(size) and off <= MATCH * max(float(size), 1e-12))


def _explain_loss(failed: SplitStep) -> Cause | None:
    """Return a cause if one term has another weight, or sequences are split."""
    n, off = len(failed.parts), failed.actual.loss - failed.expected.loss
    whole = _means_of(failed.steps.sums(failed.steps.batch))
    parts = [_means_of(sums) for sums in failed.each_part()]
    for index, mean in enumerate(whole) if n > 1 else ():
        for value in (n * mean, mean / n, sum(part[index] for part in parts)):
            if index and _is_near(failed.actual.loss, failed.expected.loss + value - mean):
                return failed.cause("term by parts", index=index, off=off)
    strategy = failed.variant.strategy
    times = strategy.axes.get("context", 1) if strategy else 1
    return failed.cause("positions", times=times) if times > 1 else None


def _means_of(sums: RowSums) -> list[float]:
    """Return coefficient times total / weight of each term."""
    pairs = zip(sums.contributions, sums.weights, strict=True)
    return [total / weight if weight else 0.0 for total, weight in pairs]


def _explain_gradient(failed: SplitStep) -> Cause | None:
    """Return a cause if something acts on the gradient of each part before the sum."""
    small = failed.scaled(SMALL)
    if distance(small.actual.gradient, small.expected.gradient).by <= MATCH:
        return failed.cause("clip before the sum")
    if not _is_near(flatten(small.actual.gradient) / SMALL, flatten(failed.actual.gradient)):
        return failed.cause("function before the sum")
    return None


def _explain_leaves(failed: SplitStep) -> Cause | None:
    actual, expected = map(named_arrays, (failed.actual.gradient, failed.expected.gradient))
    off = {name: distance(actual[name], expected[name]).by > EXPLAINED for name in expected}
    wrong, right = ([name for name in off if off[name] == each] for each in (True, False))
    if not right:
        return None
    names = {"wrong": ", ".join(wrong[:3]), "right": ", ".join(right[:3])}
    return failed.cause("missing sum (backward)", **names)


def _explain_state(failed: SplitStep) -> Cause:
    case = failed.steps.case
    trees = failed.actual.state, failed.expected.state, state_trees(init_first_state(case))
    actual, expected = map(named_arrays, trees[:2])
    differs = lambda n: n not in actual or distance(actual[n], expected[n]).by > EXPLAINED
    off = [name for name in expected if differs(name)]
    if not off:
        return failed.cause("unexplained")
    if any(name.startswith("params") for name in off):
        new, right, old = (flatten(tree["params"]) for tree in trees)
        factor, residual = fit_multiple(new - right, old)
        row = "decay per part" if residual < 10 * MATCH else "update"
        return failed.cause(row, factor=factor)
    extra = [name for name in off if name.startswith("extra")]
    for index, which in ((0, "first"), (-1, "last")) if len(failed.parts) > 1 else ():
        part = named_arrays(add_sums([failed.each_part()[index]], case).state)
        if extra and all(distance(actual[name], part[name]).by <= MATCH for name in extra):
            return failed.cause("statistics of one part", leaf=min(extra), which=which)
    return failed.cause("state", leaf=off[0])
