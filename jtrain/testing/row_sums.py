"""Loss and gradient of some rows, as sums that add up over rows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import LossOutput, combine, normalize_loss, update_extra
from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Key
from jtrain.testing.case import Loss, LossCase
from jtrain.testing.compare import StepResult
from jtrain.testing.float64 import ReplayRules, to_float64, widen


class RowSums(NamedTuple):
    """The output and gradient of a loss for some rows, as numpy arrays."""

    returned: LossOutput
    gradient: Any  # of the sum over terms of coefficient x total / given weight

    @property
    def weights(self) -> list[float]:
        """Weight of each term."""
        return [float(mean.weight) for mean in self.returned.terms.means]

    @property
    def totals(self) -> list[float]:
        """Total of each term."""
        return [float(mean.total) for mean in self.returned.terms.means]

    @property
    def contributions(self) -> list[float]:
        """Coefficient times total of each term."""
        parts = zip(self.returned.terms.coefficients, self.totals, strict=True)
        return [float(coefficient) * total for coefficient, total in parts]


@dataclasses.dataclass(eq=False)
class CompiledRowSums:
    """The sums of a case's loss over rows, compiled once for each number of rows.

    `dataclasses.replace` gives the sums at other parameters or by other rules; both share what
    was compiled.
    """

    case: LossCase
    _: dataclasses.KW_ONLY
    double: bool = False
    """Compute in float64."""
    draws: bool = True
    """Pass a key, as in training; without one the loss runs as in evaluation."""
    frozen: float | None = None
    """The uniform number in 0 .. 1 that replaces each draw; None draws."""
    integers: bool = False
    """With `double`, also compute integers that count in int64."""
    params: Any = None
    """The parameters; None: those of the case."""
    key: Key | None = None
    """The key of the step; None: that of the case."""
    programs: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.params = self.case.params if self.params is None else self.params
        self.key = self.case.step_key if self.key is None else self.key

    def __call__(self, batch: Batch, weights: Any = None) -> RowSums:
        """Return the sums of a batch, divided by `weights`, by default the batch's own."""
        with jax.enable_x64(self.double):
            args = self._arguments(batch)
            if weights is None:
                weights = jax.device_get(self._compiled("weights")(*args))
            weights = [self._scalar(w) for w in weights]
            return RowSums(*jax.device_get(self._compiled("sums")(weights, *args)))

    def weights(self, batch: Batch) -> list[float]:
        """Return the weight of each term; the compiler removes all other computation."""
        with jax.enable_x64(self.double):
            weights = jax.device_get(self._compiled("weights")(*self._arguments(batch)))
        return [float(w) for w in weights]

    def forward(self, batch: Batch) -> LossOutput:
        """Return the output of the loss for a batch, without a gradient."""
        with jax.enable_x64(self.double):
            return jax.device_get(self._compiled("forward")(*self._arguments(batch)))

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        rng = (self.key,) if self.draws else ()
        args = jax.tree.map(jnp.asarray, (self.params, self.case.extra, arrays))
        return (*to_float64(args), *rng) if self.double else (*args, *rng)

    def _scalar(self, x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.float64 if self.double else jnp.float32)

    def _compiled(self, name: str) -> Callable[..., Any]:
        rules = ReplayRules(floats=self.double, integers=self.integers, frozen=self.frozen)
        if (name, rules) not in self.programs:
            make = {"sums": make_sums, "weights": _weights_of, "forward": _forward_of}[name]
            fn = make(self.case.unplaced_loss(), not self.case.mask_error)
            plain = rules == ReplayRules(floats=False)
            self.programs[name, rules] = jax.jit(fn if plain else widen(fn, rules))
        return self.programs[name, rules]


def make_sums(loss: Loss, ragged: bool) -> Callable[..., tuple[LossOutput, Any]]:
    """Return `(weights, params, extra, batch, rng=None) -> (LossOutput, gradient)`."""
    return make_sums_of_terms(normalize_loss(loss, ragged=ragged))


def make_sums_of_terms(terms: Callable[..., LossOutput]) -> Callable[..., tuple[LossOutput, Any]]:
    """Return the same function for `(params, extra, batch, rng) -> LossOutput`."""

    def sums(weights: Any, params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        def weighted_loss(params: Any) -> Any:
            output = terms(params, extra, batch, rng)
            return combine(output.terms, weights), output

        (_, output), gradient = jax.value_and_grad(weighted_loss, has_aux=True)(params)
        return output, gradient

    return sums


def _forward_of(loss: Loss, ragged: bool) -> Callable[..., LossOutput]:
    terms = normalize_loss(loss, ragged=ragged)
    return lambda params, extra, batch, rng=None: terms(params, extra, batch, rng)


def _weights_of(loss: Loss, ragged: bool) -> Callable[..., list[Any]]:
    terms = normalize_loss(loss, ragged=ragged)

    def weights(params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        return [mean.weight for mean in terms(params, extra, batch, rng).terms.means]

    return weights


def add_parts(rows: CompiledRowSums, parts: Sequence[Batch]) -> tuple[StepResult, list[RowSums]]:
    """Add up the parts of a batch as a step does; return the result and the sums of each part."""
    weights = [sum(term_weights) for term_weights in zip(*map(rows.weights, parts), strict=True)]
    sums = [rows(part, weights) for part in parts]
    return add_sums(sums, rows.case), sums


def add_sums(sums: Sequence[RowSums], case: LossCase) -> StepResult:
    """Add up the sums of parts whose gradients were divided by the weights of all parts."""
    add = lambda *leaves: np.sum([np.asarray(x, np.float64) for x in leaves], axis=0)
    totals = np.sum([one.contributions for one in sums], axis=0)
    weights = np.sum([one.weights for one in sums], axis=0)
    loss = sum(t / w for t, w in zip(totals, weights, strict=True) if w != 0)
    metrics = [one.returned.metrics for one in sums]
    changes = jax.tree.map(add, *[one.returned.extra for one in sums])
    with jax.enable_x64(True):
        extra = (
            update_extra(to_float64(case.extra), changes)
            if jax.tree.leaves(changes)
            else case.extra
        )
    return StepResult(
        loss=float(loss),
        gradient=jax.tree.map(add, *[one.gradient for one in sums]),
        state={"extra": jax.device_get(extra)},
        metrics=flatten_metrics(jax.tree.map(add, *metrics)),
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
