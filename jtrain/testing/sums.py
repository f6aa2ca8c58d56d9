"""Sums of a loss over rows, and experiments on them that change one thing at a time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import LossOutput, combine, named_means, normalize_loss, update_extra
from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Key, Params
from jtrain.testing.case import LossCase
from jtrain.testing.compare import Distances, StepResult, compare_results, flatten
from jtrain.testing.float64 import to_float64, unless_opaque, widen
from jtrain.testing.splits import NUMBERS_OF_A_ROW, SumSplit, with_contents

GRADIENT = "the gradient"
FROZEN = (0.3, 0.6)  # uniform numbers that replace draws; most dropout keeps its inputs at both
TURNS = 8  # experiments at several parameters, since a branch may be the same at some
DRAWS_OF_PARAMS = 12


class RowSums(NamedTuple):
    """The output and gradient of a loss for some rows, as numpy arrays."""

    returned: LossOutput
    gradient: Any  # of the sum over terms of coefficient x total / given weight

    @property
    def weights(self) -> list[float]:
        """Weight of each term."""
        return [float(mean.weight) for mean in self.returned.terms.means]

    @property
    def contributions(self) -> list[float]:
        """Coefficient times total of each term."""
        terms = self.returned.terms
        pairs = zip(terms.coefficients, terms.means, strict=True)
        return [float(coefficient) * float(mean.total) for coefficient, mean in pairs]

    @property
    def named(self) -> dict[str, Any]:
        """Each mean, and as `GRADIENT` the gradient as one vector."""
        return {**named_means(self.returned), GRADIENT: flatten(self.gradient)}


@dataclasses.dataclass(eq=False, kw_only=True)
class Sums:
    """The sums of a case's loss over rows, compiled once for each number of rows.

    `dataclasses.replace` gives the sums at other parameters, rows or by other rules; all share
    what is compiled.
    """

    case: LossCase
    double: bool = False
    """Compute in float64, and integers that count in int64."""
    draws: bool = True
    """Pass a key, as in training; without one the loss runs as in evaluation."""
    frozen: float | None = None
    """The uniform number in 0 .. 1 that replaces each draw; None draws."""
    params: Any = None
    """The parameters; None: those of the case."""
    key: Key | None = None
    """The key of the step; None: that of the case."""
    batch: Any = None
    """The rows of the experiments; None: those of the case."""
    programs: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.params = self.case.params if self.params is None else self.params
        self.key = self.case.step_key if self.key is None else self.key
        self.batch = self.case.batch if self.batch is None else self.batch
        # Sums of the same numbers in another order differ in the last bits of their type; a fault
        # differs by as much in either type.
        self.close = 1e-9 if self.double else 1e-4

    def __call__(self, batch: Batch, weights: Any = None) -> RowSums:
        """Return the sums of a batch, divided by `weights`, by default the batch's own."""
        weights = self.weights(batch) if weights is None else weights
        with jax.enable_x64(self.double):
            scalars = [jnp.asarray(w, jnp.float64 if self.double else jnp.float32) for w in weights]
        return RowSums(*self._run("sums", batch, scalars))

    def weights(self, batch: Batch) -> list[float]:
        """Return the weight of each term; the compiler removes all other computation."""
        return [float(weight) for weight in self._run("weights", batch)]

    def forward(self, batch: Batch) -> dict[str, Mean]:
        """Return the means of a batch, without a gradient."""
        return named_means(self._run("forward", batch))

    def _run(self, name: str, batch: Batch, *first: Any) -> Any:
        with jax.enable_x64(self.double):
            arrays = {name: jnp.asarray(array) for name, array in batch.items()}
            args = jax.tree.map(jnp.asarray, (self.params, self.case.extra, arrays))
            args = to_float64(args) if self.double else args
            rng = (self.key,) if self.draws else ()
            return jax.device_get(self._compiled(name)(*first, *args, *rng))

    def _compiled(self, name: str) -> Callable[..., Any]:
        rules = name, self.double, self.frozen
        if rules not in self.programs:
            terms = normalize_loss(self.case.unplaced_loss(), ragged=not self.case.mask_error)
            fn = _functions(terms)[name]
            plain = not self.double and self.frozen is None
            self.programs[rules] = jax.jit(
                fn if plain else widen(fn, floats=self.double, frozen=self.frozen)
            )
        return self.programs[rules]

    def parts(self, batches: Sequence[Batch]) -> list[RowSums]:
        """Return the sums of the parts of a batch, divided by the weights of all parts."""
        weights = [sum(each) for each in zip(*map(self.weights, batches), strict=True)]
        return [self(batch, weights) for batch in batches]

    def add(self, batches: Sequence[Batch]) -> StepResult:
        """Add up the parts of a batch as a step does."""
        return add_sums(self.parts(batches), self.case)

    def compare(self, split: SumSplit) -> Distances:
        """Return the distances of the sum over the parts of a split from its whole."""
        return compare_results(self.add(split.parts), self.add([split.whole]))

    def holds(self, split: SumSplit) -> bool:
        """Return whether the parts of a split add up to its whole."""
        return self.compare(split).largest <= self.close

    # Experiments.

    @functools.cached_property
    def draws_by_key(self) -> bool:
        """True if the loss changes with the key."""
        one, other = (replace(self, key=jax.random.key(n)).add([self.batch]) for n in (11, 12))
        return compare_results(one, other).largest > 0

    @functools.cached_property
    def with_frozen_draws(self) -> Sequence["Sums"]:
        """The same sums with all draws frozen at each number of FROZEN; empty if opaque."""
        found = [replace(self, frozen=number) for number in FROZEN]
        return found if unless_opaque(lambda: found[0].weights(self.batch)) is not None else []

    def means_of(self, batch: Batch) -> dict[str, Any]:
        """Return each mean of a batch, and as `GRADIENT` the gradient of the sum of its terms."""
        return self(batch, self._ones).named

    @functools.cached_property
    def _ones(self) -> list[float]:
        """Unit weights of the terms, with which gradients of several batches add up."""
        return [1.0] * len(self.weights(self.batch))

    def changes(self, name: str, one: Batch, other: Batch) -> bool:
        """Return whether the total or the weight of a mean differs between two batches."""
        pairs = zip(*(_parts(self.means_of(batch)[name]) for batch in (one, other)), strict=True)
        return any(
            np.isfinite(a).all() != np.isfinite(b).all() or _relative(a - b, [a, b]) > self.close
            for a, b in pairs
        )

    def rows_interact(self, name: str, batch: Any = None, group: np.ndarray | None = None) -> bool:
        """Return whether the contents of one row change what another row adds to a mean.

        The rows of two groups are changed in turn. If rows do not interact, changing one group
        changes a sum by the same amount for any contents of the other group: its second difference
        is 0. Positions, row numbers, masks and draws stay the same, so they have no effect.

        Args:
            name: the mean.
            batch: the rows; by default those of the experiments.
            group: the rows of one group, bool b; by default half of the rows that count.
        """
        batch = self.batch if batch is None else batch
        draw, real = np.random.default_rng(0), np.flatnonzero(batch["mask"])
        first = np.isin(np.arange(len(batch["mask"])), real[: (len(real) + 1) // 2])
        one = first if group is None else group
        two = batch["mask"] & ~one
        for turn in range(TURNS):
            at = replace(self, params=perturb(self.params, turn)) if turn % 2 else self
            other = draw.choice(len(batch["mask"]), len(batch["mask"]))
            changed = [with_contents(batch, other, which) for which in (one, two, one | two)]
            means_at = [at(rows, self._ones).named[name] for rows in (batch, *changed)]
            with np.errstate(invalid="ignore", over="ignore"):
                for a, b, c, d in zip(*map(_parts, means_at), strict=True):
                    if _relative(a - b - c + d, [a, b, c, d]) > self.close:
                        return True
        return False

    def depends_on_rows(self, name: str, batch: Batch, which: np.ndarray) -> bool:
        """Return whether a mean depends on the contents of the rows `which`, bool b."""
        rows = np.arange(len(which))
        others = [np.roll(rows, 1), np.roll(rows, 3), np.full_like(rows, rows[which][0])]
        return any(self.changes(name, batch, with_contents(batch, x, which)) for x in others)

    def values(
        self, name: str, batches: Sequence[Batch], draws: int = DRAWS_OF_PARAMS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return totals and weights of a mean for each batch, at `draws` draws of the parameters.

        Both have the shape n d, for n batches and d draws; an array mean gives its first element.
        """
        found = []
        for seed in range(draws):
            at = replace(self, params=perturb(self.params, seed))
            means = [at(batch, self._ones).named[name] for batch in batches]
            found.append([[np.ravel(x)[0] for x in (m.total, m.weight)] for m in means])
        totals, weights = np.moveaxis(np.asarray(found, np.float64), (0, 1, 2), (2, 1, 0))
        return totals, weights


def _functions(terms: Callable[..., LossOutput]) -> Mapping[str, Callable[..., Any]]:
    def forward(params: Any, extra: Any, batch: Any, rng: Any = None) -> LossOutput:
        return terms(params, extra, batch, rng)

    weights = lambda *args: [mean.weight for mean in forward(*args).terms.means]
    return {"sums": make_sums(terms), "weights": weights, "forward": forward}


def make_sums(terms: Callable[..., LossOutput]) -> Callable[..., tuple[LossOutput, Any]]:
    """Return `(weights, params, extra, batch, rng=None) -> (LossOutput, gradient)`."""

    def sums(weights: Any, params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        def weighted_loss(params: Any) -> Any:
            output = terms(params, extra, batch, rng)
            return combine(output.terms, weights), output

        (_, output), gradient = jax.value_and_grad(weighted_loss, has_aux=True)(params)
        return output, gradient

    return sums


def add_sums(sums: Sequence[RowSums], case: LossCase) -> StepResult:
    """Add up the sums of parts whose gradients were divided by the weights of all parts."""
    add = lambda *leaves: np.sum([np.asarray(x, np.float64) for x in leaves], axis=0)
    totals = np.sum([one.contributions for one in sums], axis=0)
    weights = np.sum([one.weights for one in sums], axis=0)
    extra, changes = case.extra, jax.tree.map(add, *[one.returned.extra for one in sums])
    if jax.tree.leaves(changes):
        with jax.enable_x64(True):
            extra = update_extra(to_float64(case.extra), changes)
    return StepResult(
        loss=float(sum(t / w for t, w in zip(totals, weights, strict=True) if w != 0)),
        gradient=jax.tree.map(add, *[one.gradient for one in sums]),
        state={"extra": jax.device_get(extra)},
        metrics=flatten_metrics(jax.tree.map(add, *[one.returned.metrics for one in sums])),
    )


def flatten_metrics(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Return the value of each metric; an array metric gives one value for each element."""
    values = {}
    for name, metric in metrics.items():
        value = metric.value()
        if np.ndim(value):
            values |= {f"{name}/{i}": float(x) for i, x in enumerate(np.ravel(value))}
        else:
            values[name] = float(value)
    return values


def perturb(params: Params, seed: int, times: float = 1.0) -> Params:
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


def _parts(x: Any) -> list[np.ndarray]:
    parts = (x.total, x.weight) if isinstance(x, Mean) else (x,)
    return [np.asarray(part, np.float64) for part in parts]


def _relative(difference: np.ndarray | np.generic, operands: Sequence[np.ndarray]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        size = sum(float(np.linalg.norm(np.ravel(x))) for x in operands)
        by = float(np.linalg.norm(np.ravel(difference)))
    return by / size if np.isfinite(by) and 0 < size < np.inf else 0.0
