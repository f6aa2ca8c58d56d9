"""Experiments on the sums of a loss, each of which isolates one thing that they may depend on."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Key, Params
from jtrain.testing.case import LossCase
from jtrain.testing.compare import flatten
from jtrain.testing.float64 import if_seen
from jtrain.testing.flow import RowCoupling
from jtrain.testing.result import distances
from jtrain.testing.row_flow import MeanFlow, flows_of, means
from jtrain.testing.row_sums import CompiledRowSums, RowSums, together
from jtrain.testing.splits import SumSplit, taken

# Two sums of the same numbers in another order are off by the last bits of their type; a fault is
# off by as much in either type.
CLOSE = {True: 1e-9, False: 1e-4}  # in float64; in float32
GRADIENT = "the gradient"
FROZEN = (0.3, 0.6)  # what draws are replaced by; most dropout keeps its numbers at both
TURNS = 8  # at the parameters and at others, for choices that fall the same way at some
DRAWS_OF_PARAMS = 12


class Trials:
    """What the means of a loss depend on, found by changing one thing at a time.

    Args:
        of: the loss.
        double: whether all is computed in float64.
        frozen: the number that all draws are replaced by, if they are.
        batch: the rows that are experimented with, if not those of the loss.
    """

    def __init__(
        self,
        of: LossCase,
        *,
        double: bool,
        frozen: float | None = None,
        batch: Batch | None = None,
    ):
        self.of, self.double, self.frozen = of, double, frozen
        self.batch = of.batch if batch is None else batch
        self.rows = CompiledRowSums(of, double=double, frozen=frozen)
        self._known: dict[str, list[float]] = {}  # of each mean, how halves of the rows interplay
        self.close = CLOSE[double]

    @functools.cached_property
    def flows(self) -> Mapping[str, MeanFlow]:
        """What comes of rows in each mean, read off the trace."""
        return flows_of(self.of)

    def facts(self, kind: str) -> dict[str, RowCoupling]:
        """Return the means that have a fact about their rows, and it."""
        return {
            name: part.facts[kind]
            for name, flow in self.flows.items()
            for part in flow
            if kind in part.facts
        }

    @functools.cached_property
    def draws_by_key(self) -> bool:
        """Whether the loss is another with another key."""
        first, second = (self.rows.at(key=jax.random.key(n)) for n in (11, 12))
        one, other = (together(rows, [self.batch])[0] for rows in (first, second))
        return distances(one, other).largest > 0

    @functools.cached_property
    def undrawn(self) -> Sequence["Trials"]:
        """The same with all draws frozen, at one number and at another; none where it cannot be."""
        found = [
            self._like(CompiledRowSums(self.of, double=self.double, frozen=n), n) for n in FROZEN
        ]
        return found if if_seen(lambda: found[0].rows.weights(self.batch)) is not None else []

    @functools.cached_property
    def counted(self) -> "Trials":
        """The same with whole numbers that never overflow."""
        rows = CompiledRowSums(self.of, double=True, frozen=self.frozen, integers=True)
        return self._like(rows, self.frozen)

    def at(self, params: Params, batch: Batch, key: Key) -> "Trials":
        """Return the same experiments with other numbers."""
        other = self._like(self.rows, self.frozen)
        other.rows, other.batch = self.rows.at(params=params, key=key), batch
        if "undrawn" in self.__dict__:  # the programs that are compiled already
            other.__dict__["undrawn"] = [still.at(params, batch, key) for still in self.undrawn]
        if "counted" in self.__dict__:
            other.__dict__["counted"] = self.counted.at(params, batch, key)
        return other

    def _like(self, rows: CompiledRowSums, frozen: float | None) -> "Trials":
        """The same with other programs."""
        other = copy.copy(self)
        for name in ("draws_by_key", "undrawn", "counted"):
            other.__dict__.pop(name, None)
        other._known = {}
        other.rows, other.frozen = rows.at(params=self.rows.params, key=self.rows.key), frozen
        return other

    def holds(self, split: SumSplit) -> bool:
        """Whether the parts of a split add up to its whole."""
        got, want = (together(self.rows, parts)[0] for parts in (split.parts, [split.whole]))
        return distances(got, want).largest <= self.close

    def of_rows(self, batch: Batch) -> dict[str, Any]:
        """Each mean of a batch, and under `GRADIENT` the gradient of the sum of its terms."""
        return _named(self.rows(batch, self._ones))

    @functools.cached_property
    def _ones(self) -> list[float]:
        """What each term is divided by, so that gradients of several batches add up."""
        return [1.0] * len(self.rows.weights(self.batch))

    def changes(self, name: str, one: Batch, other: Batch) -> bool:
        """Whether a mean, its total or its weight, is another for another batch."""
        a, b = self.of_rows(one)[name], self.of_rows(other)[name]
        pairs = list(zip(_parts(a), _parts(b), strict=True))
        if any(np.isfinite(x).all() != np.isfinite(y).all() for x, y in pairs):
            return True
        return any(_relative(x - y, [x, y]) > self.close for x, y in pairs)

    def meets(
        self, name: str, batch: Batch | None = None, beside: np.ndarray | None = None
    ) -> bool:
        """Whether what one row holds changes what another one adds to a mean.

        Rows keep their places, numbers, mask and draws, so that none of these is in it: the rows
        of two groups are changed in turn, and a sum changes by as much for one group whatever the
        other holds.

        Args:
            name: of the mean.
            batch: the rows; by default those of the loss.
            beside: the rows of one group, bool b; by default half of those that count.
        """
        if batch is None:
            return max(self._of_halves(name)) > self.close
        return max(self._interplay(name, batch, beside)) > self.close

    def weight_meets(self, name: str) -> bool:
        """Whether what one row holds changes the weight that another one has."""
        return self._of_halves(name)[-1] > self.close

    def _of_halves(self, name: str) -> list[float]:
        if name not in self._known:
            self._known[name] = self._interplay(name, self.batch, None)
        return self._known[name]

    def _interplay(self, name: str, batch: Batch, beside: np.ndarray | None) -> list[float]:
        """The largest second difference of the total, and of the weight, each relative."""
        draw, real = np.random.default_rng(0), np.flatnonzero(batch["mask"])
        first = np.isin(np.arange(len(batch["mask"])), real[: (len(real) + 1) // 2])
        one = first if beside is None else beside
        two = batch["mask"] & ~one
        largest = [0.0, 0.0]
        for turn in range(TURNS):
            at = self.rows.at(params=elsewhere(self.rows.params, turn)) if turn % 2 else self.rows
            other = draw.choice(len(batch["mask"]), len(batch["mask"]))
            changed = [_holding(batch, other, which) for which in (one, two, one | two)]
            found = [_named(at(rows, self._ones))[name] for rows in (batch, *changed)]
            for i, (a, b, c, d) in enumerate(zip(*map(_parts, found), strict=True)):
                with np.errstate(invalid="ignore", over="ignore"):
                    difference = a - b - c + d
                largest[i] = max(largest[i], _relative(difference, [a, b, c, d]))
        return largest

    def holds_of(self, name: str, batch: Batch, which: np.ndarray) -> bool:
        """Whether what the rows `which`, bool b, hold is in a mean."""
        rows = np.arange(len(which))
        others = [np.roll(rows, 1), np.roll(rows, 3), np.full_like(rows, rows[which][0])]
        return any(self.changes(name, batch, _holding(batch, other, which)) for other in others)

    def values(self, name: str, batches: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray]:
        """The total and the weight of a mean for each batch, at a dozen draws of the parameters.

        Both are n d, of n batches and d draws; of a mean with a shape the first number.
        """
        found = []
        for seed in range(DRAWS_OF_PARAMS):
            at = self.rows.at(params=elsewhere(self.rows.params, seed))
            named = [_named(at(batch, self._ones))[name] for batch in batches]
            found.append([[np.ravel(x)[0] for x in (m.total, m.weight)] for m in named])
        totals, weights = np.moveaxis(np.asarray(found, np.float64), (0, 1, 2), (2, 1, 0))
        return totals, weights


def elsewhere(params: Params, seed: int, times: float = 1.0) -> Params:
    """Other parameters, of the size of those that are given, or so many times that."""
    draw = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        x = np.asarray(x)
        size = float(np.std(x)) or float(np.abs(x).mean()) or 0.1
        return (x + times * size * draw.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.map(leaf, params)


def _holding(batch: Batch, other: np.ndarray, which: np.ndarray) -> dict[str, np.ndarray]:
    """The batch whose rows `which` hold what the rows `other` do; `row` and `mask` as they are."""
    rows = np.where(which, other, np.arange(len(which)))
    return {**taken(batch, rows), "row": batch["row"], "mask": batch["mask"]}


def _named(sums: RowSums) -> dict[str, Any]:
    found: dict[str, Any] = dict(means(sums.returned))
    return {**found, GRADIENT: flatten(sums.gradient)}


def _parts(x: Any) -> list[np.ndarray]:
    """The total and the weight; of a gradient, itself."""
    parts = (x.total, x.weight) if isinstance(x, Mean) else (x,)
    return [np.asarray(part, np.float64) for part in parts]


def _relative(difference: np.ndarray | np.generic, of: Sequence[np.ndarray]) -> float:
    """The size of a difference beside that of what it was taken of."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = sum(float(np.linalg.norm(np.ravel(x))) for x in of)
        by = float(np.linalg.norm(np.ravel(difference)))
    if not np.isfinite(by) or not np.isfinite(size):
        return 0.0
    return by / size if size else 0.0
