"""The exact metrics of a loss over a whole data set, however it is batched and split."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.batches import FiniteBatches
from jtrain.core.loss import LossOutput, Stateful, normalize_loss, sum_output
from jtrain.core.loss_checks import check_split_rows
from jtrain.core.mean import Mean, Terms
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Extra, LossFn, Metrics, Params, RowsInteract
from jtrain.errors import LossError

ROUNDING = 1e-5  # of sums over rows in float32, relative
Sums: TypeAlias = tuple[Terms, Metrics]
EvaluateFn: TypeAlias = Callable[[tuple[Params, Extra], Batch], Sums]


def make_evaluate(
    loss: LossFn | Stateful,
    *,
    rows_interact: RowsInteract = "never",
    psum: Callable[[Any], Any] | None = None,
    ragged: bool = False,
) -> EvaluateFn:
    """Return `((params, extra), batch) -> sums`, pure; nothing is drawn (rng is None).

    Args:
        rows_interact: as for `make_step`. "batch": a batch is not split over copies, and the caller
            passes all rows that interact in one batch.
        psum: as for `make_step`.
        ragged: as for `make_step`.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    check_split_rows(rows_interact, 1, psum is not None)
    terms = normalize_loss(loss, ragged=ragged)

    def sums(weights: tuple[Params, Extra], batch: Batch) -> Sums:
        params, extra = weights
        batch = with_rows(batch, copies=psum is not None)
        got = terms(params, extra, batch, None)
        metrics = {"rows": Mean(jnp.sum(batch["mask"]), jnp.float32(1)), **got.metrics}
        found = LossOutput(got.terms, metrics, ())
        return (found if psum is None else sum_output(found, psum))[:2]

    return sums


def evaluate(
    program: EvaluateFn,
    weights: tuple[Params, Extra],
    batches: Iterable[Batch],
    *,
    in_flight: int = 8,
) -> dict[str, float]:
    """Return the metrics over all of `batches` (placed), summed on the host in float64.

    `loss` is the training loss over the whole set, NaN without a target in it; `rows` is the number
    of rows counted. A loss that couples rows couples them within each batch.
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


def check_row_independence(
    program: Callable[[Batch], Sums], batch: Batch, rows: FiniteBatches, name: str, shares: int
) -> None:
    """Check that the loss of each row is independent of the others, in a set of several batches.

    A loss may couple rows in training alone, as batch norm does.

    Args:
        program: the result of `make_evaluate`, compiled, as a function of a batch on the host.
        batch: the first batch of the set, on the host.
        rows: the set, called `name`.
        shares: number of shards that a batch has to divide into.

    Raises:
        LossError: if rows are coupled, with the config values that keep them in one batch.
    """
    if rows_are_coupled(program, batch):
        count = getattr(rows, "rows", len(rows) * rows.size)
        raise LossError(
            f"the loss couples the rows of a batch, in evaluation too, and batches of {rows.size} "
            f"would cut the {count} rows of `{name}` into {len(rows)}: its value would depend on "
            f"their size. Set evaluate.batch={-(-count // shares) * shares} (valid_batch= of "
            f"jt.fit), which holds them all, or evaluate.rows_interact=slice "
            f"(valid_rows_interact=) if the rows of each batch are meant to be the group."
        )


def rows_are_coupled(program: Callable[[Batch], Sums], batch: Batch) -> bool:
    """Return whether the loss of a row depends on other rows of one batch.

    Where rows are independent, the even rows, each twice, and the odd rows, each twice, together
    have twice the sums of the batch.

    Args:
        program: the result of `make_evaluate`, compiled, as a function of a batch on the host.
        batch: on the host, without hidden rows.
    """
    rows = np.arange(len(batch["mask"]))
    even, odd = rows // 2 * 2, np.minimum(rows // 2 * 2 + 1, len(rows) - 1)
    taken = lambda some: program({name: array[some] for name, array in batch.items()})
    totals = lambda sums: [float(mean.total) for mean in jax.device_get(sums)[0].means]
    full, parts = totals(program(batch)), [totals(taken(some)) for some in (even, odd)]
    for total, one, other in zip(full, *parts, strict=True):
        if abs(one + other - 2 * total) > ROUNDING * max(abs(one) + abs(other), 2 * abs(total)):
            return True
    return False


def _add(total: Sums | None, more: Sums) -> Sums:
    more = jax.tree.map(lambda x: x.astype("float64"), jax.device_get(more))
    if total is None:
        return more
    (terms, metrics), (also, others) = total, more
    means, metrics = jax.tree.map(lambda a, b: a + b, (terms.means, metrics), (also.means, others))
    return Terms(means, terms.coefficients), metrics
