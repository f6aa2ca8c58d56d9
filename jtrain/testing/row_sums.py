"""A loss and its gradient of some rows, as sums that add up over rows."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import LossOutput, combine, normalize_loss, update_extra
from jtrain.core.mean import Mean
from jtrain.core.types import Batch, Key
from jtrain.testing.case import Loss, LossCase
from jtrain.testing.float64 import ReplayRules, wide, widened
from jtrain.testing.result import StepResult


class RowSums(NamedTuple):
    """What a loss gave for some rows, on the host."""

    returned: LossOutput
    gradient: Any  # of the sum of coefficient x total / the weights that were given

    @property
    def weights(self) -> list[float]:
        """Of each term."""
        return [float(mean.weight) for mean in self.returned.terms.means]

    @property
    def totals(self) -> list[float]:
        """Of each term."""
        return [float(mean.total) for mean in self.returned.terms.means]

    @property
    def contributions(self) -> list[float]:
        """Coefficient x total of each term."""
        parts = zip(self.returned.terms.coefficients, self.totals, strict=True)
        return [float(coefficient) * total for coefficient, total in parts]


class CompiledRowSums:
    """The sums of a subject's loss over rows, compiled once for each number of rows.

    Args:
        double: whether all is computed in float64.
        draws: whether it draws, as in training; else it gets no key, as in evaluation.
        frozen: the number, uniform in 0 .. 1, that each draw is replaced by, if it is.
        integers: whether integers that count are held in int64, too; with `double`.
        params: the parameters, if not those of the subject.
        key: the key of the step, if not that of the subject.
    """

    def __init__(
        self,
        of: LossCase,
        *,
        double: bool = False,
        draws: bool = True,
        frozen: float | None = None,
        integers: bool = False,
        params: Any = None,
        key: Key | None = None,
    ):
        self.subject, self.double, self.draws = of, double, draws
        self.params = of.params if params is None else params
        self.key = of.step_key if key is None else key
        self._rules = ReplayRules(floats=double, integers=integers, frozen=frozen)
        self._programs: dict[str, Callable[..., Any]] = {}

    def at(self, *, params: Any = None, key: Key | None = None) -> "CompiledRowSums":
        """Return the same programs with other parameters or another key."""
        other = copy.copy(self)
        other.params = self.params if params is None else params
        other.key = self.key if key is None else key
        return other

    def anew(self) -> "CompiledRowSums":
        """Return the same with no program compiled yet."""
        other = copy.copy(self)
        other._programs = {}
        return other

    def __call__(self, batch: Batch, weights: Any = None) -> RowSums:
        """Of a batch; divided by these weights, by its own if there are none."""
        with jax.enable_x64(self.double):
            given = self._arguments(batch)
            if weights is None:
                weights = jax.device_get(self._compiled("weights")(*given))
            weights = [self._number(w) for w in weights]
            return RowSums(*jax.device_get(self._compiled("sums")(weights, *given)))

    def weights(self, batch: Batch) -> list[float]:
        """Of each term; the compiler drops what they do not need."""
        with jax.enable_x64(self.double):
            found = jax.device_get(self._compiled("weights")(*self._arguments(batch)))
        return [float(w) for w in found]

    def forward(self, batch: Batch) -> LossOutput:
        """What the loss returns for a batch, without its gradient."""
        with jax.enable_x64(self.double):
            return jax.device_get(self._compiled("forward")(*self._arguments(batch)))

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        rng = (self.key,) if self.draws else ()
        given = jax.tree.map(jnp.asarray, (self.params, self.subject.extra, arrays))
        return (*wide(given), *rng) if self.double else (*given, *rng)

    def _number(self, x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.float64 if self.double else jnp.float32)

    def _compiled(self, name: str) -> Callable[..., Any]:
        if name not in self._programs:
            make = {"sums": sums_of, "weights": _weights_of, "forward": _forward_of}[name]
            fn = make(self.subject.alone(), not self.subject.masks)
            plain = self._rules == self._rules._replace(floats=False, integers=False, frozen=None)
            self._programs[name] = jax.jit(fn if plain else widened(fn, self._rules))
        return self._programs[name]


def sums_of(loss: Loss, ragged: bool) -> Callable[..., tuple[LossOutput, Any]]:
    """`(weights, params, extra, batch, rng=None) -> (LossOutput, gradient)`, to be compiled."""
    return sums_of_terms(normalize_loss(loss, ragged=ragged))


def sums_of_terms(terms: Callable[..., LossOutput]) -> Callable[..., tuple[LossOutput, Any]]:
    """The same of `(params, extra, batch, rng) -> LossOutput`."""

    def sums(weights: Any, params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        def share(params: Any) -> Any:
            got = terms(params, extra, batch, rng)
            return combine(got.terms, weights), got

        (_, got), gradient = jax.value_and_grad(share, has_aux=True)(params)
        return got, gradient

    return sums


def _forward_of(loss: Loss, ragged: bool) -> Callable[..., LossOutput]:
    terms = normalize_loss(loss, ragged=ragged)
    return lambda params, extra, batch, rng=None: terms(params, extra, batch, rng)


def _weights_of(loss: Loss, ragged: bool) -> Callable[..., list[Any]]:
    terms = normalize_loss(loss, ragged=ragged)

    def weights(params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        return [mean.weight for mean in terms(params, extra, batch, rng).terms.means]

    return weights


def together(rows: CompiledRowSums, parts: Sequence[Batch]) -> tuple[StepResult, list[RowSums]]:
    """What the parts of a batch add up to, as a step adds them; and the sums of each."""
    weights = [sum(of_term) for of_term in zip(*map(rows.weights, parts), strict=True)]
    sums = [rows(part, weights) for part in parts]
    return added(sums, rows.subject), sums


def added(sums: Sequence[RowSums], of: LossCase) -> StepResult:
    """The result of several parts whose gradients were divided by the weights of all."""
    add = lambda *leaves: np.sum([np.asarray(x, np.float64) for x in leaves], axis=0)
    totals = np.sum([one.contributions for one in sums], axis=0)
    weights = np.sum([one.weights for one in sums], axis=0)
    loss = sum(t / w for t, w in zip(totals, weights, strict=True) if w != 0)
    metrics = [one.returned.metrics for one in sums]
    changes = jax.tree.map(add, *[one.returned.extra for one in sums])
    with jax.enable_x64(True):
        extra = update_extra(wide(of.extra), changes) if jax.tree.leaves(changes) else of.extra
    return StepResult(
        loss=float(loss),
        gradient=jax.tree.map(add, *[one.gradient for one in sums]),
        state={"extra": jax.device_get(extra)},
        metrics=flat_metrics(jax.tree.map(add, *metrics)),
    )


def flat_metrics(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The value of each; of one with a shape each number by its place."""
    found = {}
    for name, metric in metrics.items():
        value = metric.value()
        if np.ndim(value):
            found |= {f"{name}/{i}": float(x) for i, x in enumerate(np.ravel(value))}
        else:
            found[name] = float(value)
    return found
