"""A loss and its gradient of some rows, as sums that add up over rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.terms import Returned, absorb, combine, in_terms
from jtrain.testing.result import Result
from jtrain.testing.subject import Loss, Subject
from jtrain.testing.widened import wide, widened
from jtrain.types import Batch, Mean


class Sums(NamedTuple):
    """What a loss gave for some rows, on the host."""

    returned: Returned
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


class OfRows:
    """The sums of a subject's loss over rows, compiled once for each number of rows.

    Args:
        double: whether all is computed in float64.
        draws: whether it draws, as in training; else it gets no key, as in evaluation.
    """

    def __init__(self, of: Subject, *, double: bool = False, draws: bool = True):
        self.subject, self.double, self.draws = of, double, draws

    def __call__(self, batch: Batch, weights: Any = None) -> Sums:
        """Of a batch; divided by these weights, by its own if there are none."""
        with jax.enable_x64(self.double):
            given = self._arguments(batch)
            if weights is None:
                weights = jax.device_get(self._weights(*given))
            return Sums(*jax.device_get(self._sums([self._number(w) for w in weights], *given)))

    def weights(self, batch: Batch) -> list[float]:
        """Of each term; the compiler drops what they do not need."""
        with jax.enable_x64(self.double):
            return [float(w) for w in jax.device_get(self._weights(*self._arguments(batch)))]

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        rng = (self.subject.step_key,) if self.draws else ()
        given = jax.tree.map(jnp.asarray, (self.subject.params, self.subject.extra, arrays))
        return (*wide(given), *rng) if self.double else (*given, *rng)

    def _number(self, x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.float64 if self.double else jnp.float32)

    @functools.cached_property
    def _sums(self) -> Callable[..., Any]:
        return self._compiled(sums_of(self.subject.alone(), not self.subject.masks))

    @functools.cached_property
    def _weights(self) -> Callable[..., Any]:
        return self._compiled(_weights_of(self.subject.alone(), not self.subject.masks))

    def _compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(widened(fn) if self.double else fn)


def sums_of(loss: Loss, ragged: bool) -> Callable[..., tuple[Returned, Any]]:
    """`(weights, params, extra, batch, rng=None) -> (Returned, gradient)`, to be compiled."""
    terms = in_terms(loss, ragged=ragged)

    def sums(weights: Any, params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        def share(params: Any) -> Any:
            got = terms(params, extra, batch, rng)
            return combine(got.terms, weights), got

        (_, got), gradient = jax.value_and_grad(share, has_aux=True)(params)
        return got, gradient

    return sums


def _weights_of(loss: Loss, ragged: bool) -> Callable[..., list[Any]]:
    terms = in_terms(loss, ragged=ragged)

    def weights(params: Any, extra: Any, batch: Any, rng: Any = None) -> Any:
        return [mean.weight for mean in terms(params, extra, batch, rng).terms.means]

    return weights


def together(rows: OfRows, parts: Sequence[Batch]) -> tuple[Result, list[Sums]]:
    """What the parts of a batch add up to, as a step adds them; and the sums of each."""
    weights = [sum(of_term) for of_term in zip(*map(rows.weights, parts), strict=True)]
    sums = [rows(part, weights) for part in parts]
    return added(sums, rows.subject), sums


def added(sums: Sequence[Sums], of: Subject) -> Result:
    """The result of several parts whose gradients were divided by the weights of all."""
    add = lambda *leaves: np.sum([np.asarray(x, np.float64) for x in leaves], axis=0)
    totals = np.sum([one.contributions for one in sums], axis=0)
    weights = np.sum([one.weights for one in sums], axis=0)
    loss = sum(t / w for t, w in zip(totals, weights, strict=True) if w != 0)
    metrics = [one.returned.metrics for one in sums]
    changes = jax.tree.map(add, *[one.returned.extra for one in sums])
    with jax.enable_x64(True):
        extra = absorb(wide(of.extra), changes) if jax.tree.leaves(changes) else of.extra
    return Result(
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
