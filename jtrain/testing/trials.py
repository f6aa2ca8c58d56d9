"""Experiments on the sums of a loss, each of which isolates one dependence."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.interpret import DifferentProgramsError
from jtrain.core.loss import named_means
from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Key, Params
from jtrain.testing.case import LossCase
from jtrain.testing.compare import compare_results, flatten
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.flow import RowCoupling, RowFlow, trace_flows
from jtrain.testing.row_sums import CompiledRowSums, RowSums, add_parts
from jtrain.testing.splits import SumSplit, take_rows

# Sums of the same numbers in another order differ in the last bits of their type; a fault differs
# by as much in either type.
CLOSE = {True: 1e-9, False: 1e-4}  # in float64; in float32
GRADIENT = "the gradient"
FROZEN = (0.3, 0.6)  # uniform numbers that replace draws; most dropout keeps its inputs at both
TURNS = 8  # experiments at several parameters, since a branch may be the same at some
DRAWS_OF_PARAMS = 12


NUMBERS_OF_A_ROW = {"row", "mask"}


class MeanFlow(NamedTuple):
    """Row flow of the total and the weight of a mean."""

    total: RowFlow = RowFlow()
    weight: RowFlow = RowFlow()


class Trials:
    """Experiments that find what the means of a loss depend on, changing one thing at a time.

    Args:
        rows: the sums of the loss: in float32 or float64, with draws or without.
        batch: the rows of the experiments; by default those of the case.
    """

    def __init__(self, rows: CompiledRowSums, batch: Batch | None = None):
        self.rows, self.case, self.double = rows, rows.case, rows.double
        self.batch = rows.case.batch if batch is None else batch
        self.close = CLOSE[rows.double]
        self._interactions: dict[str, list[float]] = {}  # of two halves, for each mean

    @functools.cached_property
    def flows(self) -> Mapping[str, MeanFlow]:
        """Row flow of each mean, from the trace."""
        return trace_mean_flows(self.case)

    def facts(self, kind: str) -> dict[str, RowCoupling]:
        """Return the row coupling of one kind for each mean that has it."""
        return {
            name: part.facts[kind]
            for name, flow in self.flows.items()
            for part in flow
            if kind in part.facts
        }

    @functools.cached_property
    def draws_by_key(self) -> bool:
        """True if the loss changes with the key."""
        first, second = (replace(self.rows, key=jax.random.key(n)) for n in (11, 12))
        one, other = (add_parts(rows, [self.batch])[0] for rows in (first, second))
        return compare_results(one, other).largest > 0

    @functools.cached_property
    def frozen_trials(self) -> Sequence["Trials"]:
        """The same experiments with all draws frozen at each number of FROZEN; empty if opaque."""
        found = [Trials(replace(self.rows, frozen=n), self.batch) for n in FROZEN]
        return found if unless_opaque(lambda: found[0].rows.weights(self.batch)) is not None else []

    @functools.cached_property
    def without_overflow(self) -> "Trials":
        """The same experiments with integers that never overflow."""
        return Trials(replace(self.rows, double=True, integers=True), self.batch)

    def at(self, params: Params, batch: Batch, key: Key) -> "Trials":
        """Return the same experiments with other parameters, batch and key."""
        return Trials(replace(self.rows, params=params, key=key), batch)

    def holds(self, split: SumSplit) -> bool:
        """Return whether the parts of a split add up to its whole."""
        actual, expected = (
            add_parts(self.rows, parts)[0] for parts in (split.parts, [split.whole])
        )
        return compare_results(actual, expected).largest <= self.close

    def means_of(self, batch: Batch) -> dict[str, Any]:
        """Return each mean of a batch, and as `GRADIENT` the gradient of the sum of its terms."""
        return _named(self.rows(batch, self._ones))

    @functools.cached_property
    def _ones(self) -> list[float]:
        """Unit weights of the terms, with which gradients of several batches add up."""
        return [1.0] * len(self.rows.weights(self.batch))

    def changes(self, name: str, one: Batch, other: Batch) -> bool:
        """Return whether the total or the weight of a mean differs between two batches."""
        a, b = self.means_of(one)[name], self.means_of(other)[name]
        pairs = list(zip(_parts(a), _parts(b), strict=True))
        if any(np.isfinite(x).all() != np.isfinite(y).all() for x, y in pairs):
            return True
        return any(_relative(x - y, [x, y]) > self.close for x, y in pairs)

    def rows_interact(
        self, name: str, batch: Batch | None = None, group: np.ndarray | None = None
    ) -> bool:
        """Return whether the contents of one row change what another row adds to a mean.

        The rows of two groups are changed in turn. If rows do not interact, changing one group
        changes a sum by the same amount for any contents of the other group. Positions, row
        numbers, masks and draws stay the same, so they have no effect.

        Args:
            name: the mean.
            batch: the rows; by default those of the experiments.
            group: the rows of one group, bool b; by default half of the rows that count.
        """
        if batch is None:
            return max(self._interaction_of_halves(name)) > self.close
        return max(self._interaction(name, batch, group)) > self.close

    def weights_interact(self, name: str) -> bool:
        """Return whether the contents of one row change the weight of another row."""
        return self._interaction_of_halves(name)[-1] > self.close

    def _interaction_of_halves(self, name: str) -> list[float]:
        if name not in self._interactions:
            self._interactions[name] = self._interaction(name, self.batch, None)
        return self._interactions[name]

    def _interaction(self, name: str, batch: Batch, group: np.ndarray | None) -> list[float]:
        """Return the largest relative second difference of the total, and that of the weight."""
        draw, real = np.random.default_rng(0), np.flatnonzero(batch["mask"])
        first = np.isin(np.arange(len(batch["mask"])), real[: (len(real) + 1) // 2])
        one = first if group is None else group
        two = batch["mask"] & ~one
        largest = [0.0, 0.0]
        for turn in range(TURNS):
            params = perturb_params(self.rows.params, turn) if turn % 2 else self.rows.params
            at = replace(self.rows, params=params)
            other = draw.choice(len(batch["mask"]), len(batch["mask"]))
            changed = [with_contents(batch, other, which) for which in (one, two, one | two)]
            means_at = [_named(at(rows, self._ones))[name] for rows in (batch, *changed)]
            for i, (a, b, c, d) in enumerate(zip(*map(_parts, means_at), strict=True)):
                with np.errstate(invalid="ignore", over="ignore"):
                    difference = a - b - c + d
                largest[i] = max(largest[i], _relative(difference, [a, b, c, d]))
        return largest

    def depends_on_rows(self, name: str, batch: Batch, which: np.ndarray) -> bool:
        """Return whether a mean depends on the contents of the rows `which`, bool b."""
        rows = np.arange(len(which))
        others = [np.roll(rows, 1), np.roll(rows, 3), np.full_like(rows, rows[which][0])]
        return any(
            self.changes(name, batch, with_contents(batch, other, which)) for other in others
        )

    def values(
        self, name: str, batches: Sequence[Batch], draws: int = DRAWS_OF_PARAMS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return totals and weights of a mean for each batch, at `draws` draws of the parameters.

        Both have the shape n d, for n batches and d draws; an array mean gives its first element.
        """
        found = []
        for seed in range(draws):
            at = replace(self.rows, params=perturb_params(self.rows.params, seed))
            named = [_named(at(batch, self._ones))[name] for batch in batches]
            found.append([[np.ravel(x)[0] for x in (m.total, m.weight)] for m in named])
        totals, weights = np.moveaxis(np.asarray(found, np.float64), (0, 1, 2), (2, 1, 0))
        return totals, weights


def perturb_params(params: Params, seed: int, times: float = 1.0) -> Params:
    """Add normal noise to the parameters, `times` as large as their standard deviation."""
    draw = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        x = np.asarray(x)
        size = float(np.std(x)) or float(np.abs(x).mean()) or 0.1
        return (x + times * size * draw.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.map(leaf, params)


def scale_rows(batch: Batch, scale: np.ndarray, side: np.ndarray) -> dict[str, np.ndarray]:
    """Scale the floats of a batch by a factor for each row; fractions and flags stay in 0 .. 1."""

    def leaf(name: str, x: np.ndarray) -> np.ndarray:
        if name in NUMBERS_OF_A_ROW or x.dtype.kind != "f" or np.isin(x, (0, 1)).all():
            return x
        times = scale if (x >= 0).all() else scale * side
        if ((x >= 0) & (x <= 1)).all():
            times = np.minimum(scale, 1)
        return (x * times.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    return {name: leaf(name, np.asarray(x)) for name, x in batch.items()}


def with_contents(batch: Batch, other: np.ndarray, which: np.ndarray) -> dict[str, np.ndarray]:
    """Return the batch with the contents of rows `other` in rows `which`; keep `row` and `mask`."""
    rows = np.where(which, other, np.arange(len(which)))
    return {**take_rows(batch, rows), "row": batch["row"], "mask": batch["mask"]}


def _named(sums: RowSums) -> dict[str, Any]:
    found: dict[str, Any] = dict(named_means(sums.returned))
    return {**found, GRADIENT: flatten(sums.gradient)}


def _parts(x: Any) -> list[np.ndarray]:
    """Return the total and the weight of a mean; a gradient as it is."""
    parts = (x.total, x.weight) if isinstance(x, Mean) else (x,)
    return [np.asarray(part, np.float64) for part in parts]


def _relative(difference: np.ndarray | np.generic, operands: Sequence[np.ndarray]) -> float:
    """Return the norm of a difference relative to the norms of its operands."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = sum(float(np.linalg.norm(np.ravel(x))) for x in operands)
        by = float(np.linalg.norm(np.ravel(difference)))
    if not np.isfinite(by) or not np.isfinite(size):
        return 0.0
    return by / size if size else 0.0


def trace_mean_flows(case: LossCase) -> Mapping[str, MeanFlow]:
    """Return the row flow of each mean of a loss in training; empty if unknown.

    The flow is unknown if the loss takes only one number of rows, or traces to a different program
    for another number.
    """
    if case.half_error:
        return {}
    large, small = case.trace, case.trace_of_half
    inputs = [_input_flow(argument, path) for argument, path in large.inputs]
    try:
        found = trace_flows(large.program, small.program, inputs)
    except DifferentProgramsError:
        return {}
    structure = jax.tree.structure(large.returned)
    by_name = named_means(jax.tree.unflatten(structure, [_Leaf(flow) for flow in found]))
    return {name: MeanFlow(mean.total.flow, mean.weight.flow) for name, mean in by_name.items()}


class _Leaf(NamedTuple):
    flow: RowFlow


def _input_flow(argument: int, path: Any) -> RowFlow:
    """Return the flow of an input, from its argument: params 0, extra 1, batch 2, rng 3."""
    contents = argument == 2 and path[0].key not in NUMBERS_OF_A_ROW
    return RowFlow(contents=contents, drawn=argument == 3)
