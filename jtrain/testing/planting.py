"""Planted inputs: other parameters and batches, chosen so that both sides of branches occur."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.jaxpr import equations_in
from jtrain.core.types import Batch, Key, Params
from jtrain.testing.case import LossCase
from jtrain.testing.float64 import ReplayRules, widen
from jtrain.testing.result import Cause, Distances, compare_results
from jtrain.testing.row_flow import NUMBERS_OF_A_ROW
from jtrain.testing.row_sums import CompiledRowSums, add_parts
from jtrain.testing.splits import SumSplit, make_ragged, split_halves
from jtrain.testing.trials import Trials, perturb_params
from jtrain.testing.verdict import is_finite
from jtrain.testing.why_neighbours import explain_branch
from jtrain.testing.why_rows import explain_split

SCALES = 10.0 ** np.linspace(-4, 4, 17)  # factors of row contents and of parameters
NARROWER = 12  # bisection steps towards the point where a branch changes
# Choices by one number: a comparison of two numbers, or their maximum.
CHOICES = {"gt", "lt", "ge", "le", "max", "min"}


class PlantedNumbers(NamedTuple):
    """Parameters, batch and key that replace those of the case."""

    params: Params
    batch: Batch
    key: Key


class PlantingResult(NamedTuple):
    """The result of planting: the largest distance, and its cause if it is too large."""

    distances: Distances
    cause: Cause | None


def compare_planted(case: LossCase, single: Trials, double: Trials | None) -> PlantingResult | None:
    """Compare two halves with their whole for inputs that take both sides of branches.

    The result is None if rows are coupled by declaration or no planted input stays finite. A
    difference in float32 is confirmed in float64 if possible.
    """
    # A loop with a condition may not end for other numbers.
    names = {equation.primitive.name for equation in equations_in(case.trace.program.jaxpr)}
    loops = "while" in names
    worst: Distances | None = None
    for numbers in _candidates(case, vary_numbers=not loops):
        off = _half_distances(numbers, single)
        if off is None:
            continue
        if cause := _cause(numbers, off, single, double, explain_split):
            return PlantingResult(off, cause)
        worst = off if worst is None or off.largest > worst.largest else worst
    for numbers in () if loops else _at_branches(case, single):
        off = _half_distances(numbers, single)
        if off and (cause := _cause(numbers, off, single, double, _explain_branch)):
            return PlantingResult(off, cause)
    return None if worst is None else PlantingResult(worst, None)


def _half_distances(numbers: PlantedNumbers, trials: Trials) -> Distances | None:
    """Return the distances of halves from their whole; None if one of them is not finite."""
    split, at = _split(numbers, trials)
    (actual, parts), (expected, whole) = (
        add_parts(at.rows, x) for x in (split.parts, [split.whole])
    )
    if any(weight < 0 for sums in (*parts, *whole) for weight in sums.weights):
        return None
    return compare_results(actual, expected) if is_finite(actual) and is_finite(expected) else None


def _split(numbers: PlantedNumbers, trials: Trials) -> tuple[SumSplit, Trials]:
    batch = numbers.batch if trials.case.mask_error else make_ragged(numbers.batch)
    return split_halves(batch), trials.at(numbers.params, numbers.batch, numbers.key)


def _cause(
    numbers: PlantedNumbers,
    off: Distances,
    single: Trials,
    double: Trials | None,
    why: Callable[[SumSplit, Trials], Cause],
) -> Cause | None:
    """Return why halves differ from their whole; None if they differ by rounding only."""
    if off.largest <= single.close:
        return None
    trials = double or single
    if double and (exact := _half_distances(numbers, double)) and exact.largest <= double.close:
        return None
    return why(*_split(numbers, trials))


def _candidates(case: LossCase, *, vary_numbers: bool) -> Iterator[PlantedNumbers]:
    """Yield other keys and orders of rows; with `moved` also other contents and parameters."""
    for seed, size in enumerate((0.0, 1.0, 3.0)):
        draw, key = np.random.default_rng(seed), jax.random.key(100 + seed)
        params = perturb_params(case.params, seed, size) if size and vary_numbers else case.params
        rows = draw.permutation(case.rows)
        scale = 10 ** (vary_numbers * draw.uniform(-1, 1, case.rows))
        side = draw.choice([-1.0, 1.0], case.rows) if vary_numbers else np.ones(case.rows)
        batch = {n: x if n in NUMBERS_OF_A_ROW else x[rows] for n, x in case.batch.items()}
        yield PlantedNumbers(params, _scale_rows(batch, scale, side), key)


def _scale_rows(batch: Mapping[str, Any], scale: np.ndarray, side: np.ndarray) -> dict[str, Any]:
    """Scale the floats of a batch by a factor for each row; fractions and flags stay in 0 .. 1."""

    def leaf(name: str, x: np.ndarray) -> np.ndarray:
        if name in NUMBERS_OF_A_ROW or x.dtype.kind != "f" or np.isin(x, (0, 1)).all():
            return x
        times = scale if (x >= 0).all() else scale * side
        if ((x >= 0) & (x <= 1)).all():
            times = np.minimum(scale, 1)
        return (x * times.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    return {name: leaf(name, np.asarray(x)) for name, x in batch.items()}


def _at_branches(case: LossCase, trials: Trials) -> Iterator[PlantedNumbers]:
    """Yield pairs of close inputs between which a choice by a sum over rows changes."""
    means = [mean for flow in trials.flows.values() for mean in flow]
    if not any("branch" in x.facts and x.facts["branch"].contents for x in means):
        return
    choices = _make_choices(case, trials.rows)
    batch = case.batch if case.mask_error else make_ragged(case.batch)
    ones = np.ones(case.rows)
    paths = (
        lambda s: PlantedNumbers(case.params, _scale_rows(batch, s * ones, ones), case.step_key),
        lambda s: PlantedNumbers(_scale_params(case.params, s), batch, case.step_key),
    )
    for path in paths:
        sides = [choices(path(s)) for s in SCALES]
        for i, (one, other) in enumerate(itertools.pairwise(sides)):
            for choice in np.flatnonzero(one != other):
                yield from _bisect(path, choices, int(choice), SCALES[i], SCALES[i + 1])


def _bisect(
    path: Callable[[float], PlantedNumbers],
    choices: Callable[[PlantedNumbers], np.ndarray],
    choice: int,
    low: float,
    high: float,
) -> Iterator[PlantedNumbers]:
    """Bisect a path to two close inputs between which one choice changes; yield both."""
    start = choices(path(low))[choice]
    for _ in range(NARROWER):
        between = float(np.sqrt(low * high))
        if choices(path(between))[choice] == start:
            low = between
        else:
            high = between
    yield path(low)
    yield path(high)


def _make_choices(case: LossCase, rows: CompiledRowSums) -> Callable[[PlantedNumbers], np.ndarray]:
    """Return a compiled function from inputs to the outcome of each scalar choice, bool n."""

    def sides(params: Any, extra: Any, batch: Any, rng: Any) -> Any:
        found = []

        def look(equation: Any, inputs: Any) -> None:
            if equation.primitive.name in CHOICES and not any(x.shape for x in inputs):
                found.append(inputs[0] > inputs[1])

        widen(case.terms(), ReplayRules(floats=False, look=look))(params, extra, batch, rng)
        return jnp.stack(found) if found else jnp.zeros(0, bool)

    compiled = jax.jit(sides)
    given = lambda numbers: jax.tree.map(
        jnp.asarray, (numbers.params, case.extra, dict(numbers.batch))
    )
    return lambda numbers: np.asarray(compiled(*given(numbers), numbers.key))


def _scale_params(params: Params, scale: float) -> Params:
    return jax.tree.map(lambda x: (np.asarray(x) * scale).astype(np.asarray(x).dtype), params)


def _explain_branch(split: SumSplit, trials: Trials) -> Cause:
    """Return the cause of a branch that the planted inputs were chosen for."""
    for name, flow in trials.flows.items():
        for mean in flow:
            where = mean.facts.get("branch")
            if where and where.contents:
                return explain_branch(name, where)
    return explain_split(split, trials)
