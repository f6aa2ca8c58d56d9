"""Other numbers in the place of those of a batch, so that both sides of a branch occur."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.jaxpr import equations_in
from jtrain.core.types import Batch, Key, Params
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.float64 import ReplayRules, widened
from jtrain.testing.result import Distances, distances
from jtrain.testing.row_flow import NUMBERS_OF_A_ROW
from jtrain.testing.row_sums import CompiledRowSums, together
from jtrain.testing.splits import SumSplit, ragged, two_halves
from jtrain.testing.trials import Trials, elsewhere
from jtrain.testing.verdict import is_finite
from jtrain.testing.why_neighbours import branch_on_batch
from jtrain.testing.why_rows import cause_of_split

SCALES = 10.0 ** np.linspace(-4, 4, 17)  # of what rows hold, and of parameters
NARROWER = 12  # times that the place where a branch is taken is halved
# A choice by one number: two numbers are compared, or the larger is taken.
CHOICES = {"gt", "lt", "ge", "le", "max", "min"}


class PlantedNumbers(NamedTuple):
    """Numbers that a loss is called with in the place of its own."""

    params: Params
    batch: Batch
    key: Key


class PlantingResult(NamedTuple):
    """What came of planting: the largest distance, and why, if it is too large."""

    apart: Distances
    cause: Cause | None


def planted(of: LossCase, single: Trials, double: Trials | None) -> PlantingResult | None:
    """Return how far two halves are from their whole where both sides of branches are taken.

    None where nothing can be planted: rows that meet by declaration, or no numbers that stay
    finite. A difference in float32 is looked at in float64 where that is known.
    """
    # A loop that goes on until it is content may not end for other numbers.
    names = {equation.primitive.name for equation in equations_in(of.trace.program.jaxpr)}
    loops = "while" in names
    worst: Distances | None = None
    for numbers in _numbers(of, moved=not loops):
        apart = _apart(numbers, single)
        if apart is None:
            continue
        if cause := _cause(numbers, apart, single, double, cause_of_split):
            return PlantingResult(apart, cause)
        worst = apart if worst is None or apart.largest > worst.largest else worst
    for numbers in () if loops else _at_branches(of, single):
        apart = _apart(numbers, single)
        if apart and (cause := _cause(numbers, apart, single, double, _branch)):
            return PlantingResult(apart, cause)
    return None if worst is None else PlantingResult(worst, None)


def _apart(numbers: PlantedNumbers, trials: Trials) -> Distances | None:
    """How far halves are from their whole; None where one of them is not finite."""
    split, at = _split(numbers, trials)
    (got, parts), (want, whole) = (together(at.rows, x) for x in (split.parts, [split.whole]))
    if any(weight < 0 for sums in (*parts, *whole) for weight in sums.weights):
        return None
    return distances(got, want) if is_finite(got) and is_finite(want) else None


def _split(numbers: PlantedNumbers, trials: Trials) -> tuple[SumSplit, Trials]:
    batch = numbers.batch if trials.of.masks else ragged(numbers.batch)
    return two_halves(batch), trials.at(numbers.params, numbers.batch, numbers.key)


def _cause(
    numbers: PlantedNumbers,
    apart: Distances,
    single: Trials,
    double: Trials | None,
    why: Callable[[SumSplit, Trials], Cause],
) -> Cause | None:
    """Why halves are no whole; None where they are, but for rounding."""
    if apart.largest <= single.close:
        return None
    trials = double or single
    if double and (exact := _apart(numbers, double)) and exact.largest <= double.close:
        return None
    return why(*_split(numbers, trials))


def _numbers(of: LossCase, *, moved: bool) -> Iterator[PlantedNumbers]:
    """A few other keys and orders of rows; `moved`: other numbers and parameters, too."""
    for seed, size in enumerate((0.0, 1.0, 3.0)):
        draw, key = np.random.default_rng(seed), jax.random.key(100 + seed)
        params = elsewhere(of.params, seed, size) if size and moved else of.params
        rows = draw.permutation(of.rows)
        scale = 10 ** (moved * draw.uniform(-1, 1, of.rows))
        side = draw.choice([-1.0, 1.0], of.rows) if moved else np.ones(of.rows)
        batch = {n: x if n in NUMBERS_OF_A_ROW else x[rows] for n, x in of.batch.items()}
        yield PlantedNumbers(params, _scaled(batch, scale, side), key)


def _scaled(batch: Mapping[str, Any], scale: np.ndarray, side: np.ndarray) -> dict[str, Any]:
    """The batch, its floats times a number of each row; what is a share or a flag stays one."""

    def leaf(name: str, x: np.ndarray) -> np.ndarray:
        if name in NUMBERS_OF_A_ROW or x.dtype.kind != "f" or np.isin(x, (0, 1)).all():
            return x
        times = scale if (x >= 0).all() else scale * side
        if ((x >= 0) & (x <= 1)).all():
            times = np.minimum(scale, 1)
        return (x * times.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    return {name: leaf(name, np.asarray(x)) for name, x in batch.items()}


def _at_branches(of: LossCase, trials: Trials) -> Iterator[PlantedNumbers]:
    """Numbers at which a choice by a sum over rows falls the one way, and just so the other."""
    means = [mean for flow in trials.flows.values() for mean in flow]
    if not any("branch" in x.facts and x.facts["branch"].contents for x in means):
        return
    choices = _choices(of, trials.rows)
    batch = of.batch if of.masks else ragged(of.batch)
    ones = np.ones(of.rows)
    paths = (
        lambda s: PlantedNumbers(of.params, _scaled(batch, s * ones, ones), of.step_key),
        lambda s: PlantedNumbers(_times(of.params, s), batch, of.step_key),
    )
    for path in paths:
        sides = [choices(path(s)) for s in SCALES]
        for i, (one, other) in enumerate(itertools.pairwise(sides)):
            for choice in np.flatnonzero(one != other):
                yield from _narrowed(path, choices, int(choice), SCALES[i], SCALES[i + 1])


def _narrowed(
    path: Callable[[float], PlantedNumbers],
    choices: Callable[[PlantedNumbers], np.ndarray],
    choice: int,
    low: float,
    high: float,
) -> Iterator[PlantedNumbers]:
    """Both ends of a path at which one choice falls otherwise, near one another."""
    start = choices(path(low))[choice]
    for _ in range(NARROWER):
        between = float(np.sqrt(low * high))
        if choices(path(between))[choice] == start:
            low = between
        else:
            high = between
    yield path(low)
    yield path(high)


def _choices(of: LossCase, rows: CompiledRowSums) -> Callable[[PlantedNumbers], np.ndarray]:
    """`numbers -> which way each choice by one number falls`, bool n; compiled once."""

    def sides(params: Any, extra: Any, batch: Any, rng: Any) -> Any:
        found = []

        def look(equation: Any, inputs: Any) -> None:
            if equation.primitive.name in CHOICES and not any(x.shape for x in inputs):
                found.append(inputs[0] > inputs[1])

        widened(of.terms(), ReplayRules(floats=False, look=look))(params, extra, batch, rng)
        return jnp.stack(found) if found else jnp.zeros(0, bool)

    compiled = jax.jit(sides)
    given = lambda numbers: jax.tree.map(
        jnp.asarray, (numbers.params, of.extra, dict(numbers.batch))
    )
    return lambda numbers: np.asarray(compiled(*given(numbers), numbers.key))


def _times(params: Params, scale: float) -> Params:
    return jax.tree.map(lambda x: (np.asarray(x) * scale).astype(np.asarray(x).dtype), params)


def _branch(split: SumSplit, trials: Trials) -> Cause:
    """The branch that was looked for: without it the sums add up."""
    for name, flow in trials.flows.items():
        for mean in flow:
            where = mean.facts.get("branch")
            if where and where.contents:
                return branch_on_batch(name, where)
    return cause_of_split(split, trials)
