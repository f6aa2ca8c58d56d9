"""The exact metrics of a loss over a whole data set, however it is batched and split."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.rows import with_rows
from jtrain.terms import in_terms
from jtrain.types import Batch, Extra, LossFn, Mean, Metrics, Params, Stateful, Terms

Sums: TypeAlias = tuple[Terms, Metrics]
EvaluateFn: TypeAlias = Callable[[tuple[Params, Extra], Batch], Sums]


def make_evaluate(
    loss: LossFn | Stateful,
    *,
    psum: Callable[[Any], Any] | None = None,
    ragged: bool = False,
) -> EvaluateFn:
    """`((params, extra), batch) -> sums`, pure; nothing is drawn (the loss's rng is None)."""
    terms = in_terms(loss, ragged=ragged)

    def sums(weights: tuple[Params, Extra], batch: Batch) -> Sums:
        params, extra = weights
        batch = with_rows(batch, copies=psum is not None)
        got = terms(params, extra, batch, None)
        found = got.terms, {"rows": Mean(jnp.sum(batch["mask"]), jnp.float32(1)), **got.metrics}
        return found if psum is None else _summed(found, psum)

    return sums


def evaluate(
    program: EvaluateFn,
    weights: tuple[Params, Extra],
    batches: Iterable[Batch],
    *,
    in_flight: int = 8,
) -> dict[str, float]:
    """The metrics over all of `batches` (placed), summed on the host in float64.

    `loss` is what training minimises, over the whole set; `rows` says how many rows were counted.
    """
    started, total = collections.deque(), None
    for batch in batches:
        started.append(program(weights, batch))
        if len(started) > in_flight:
            total = _add(total, started.popleft())
    for sums in started:
        total = _add(total, sums)
    if total is None:
        return {}
    terms, metrics = total
    rows = int(metrics["rows"].total)
    rest = {name: mean.value() for name, mean in metrics.items() if name != "rows"}
    return {"loss": terms.value(), **rest, "rows": rows}


def _summed(found: Sums, psum: Callable[[Any], Any]) -> Sums:
    terms, metrics = found  # coefficients are no sums over rows
    means, metrics = psum((terms.means, metrics))
    return Terms(means, terms.coefficients), metrics


def _add(total: Sums | None, more: Sums) -> Sums:
    more = jax.tree.map(lambda x: x.astype("float64"), jax.device_get(more))
    if total is None:
        return more
    (terms, metrics), (also, others) = total, more
    means, metrics = jax.tree.map(lambda a, b: a + b, (terms.means, metrics), (also.means, others))
    return Terms(means, terms.coefficients), metrics
