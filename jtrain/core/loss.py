"""Losses in one form: terms to minimise, metrics, and the state that a loss carries."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.mean import Mean, Terms, Update, sum_dtype
from jtrain.core.pytree import at_least_f32, named_leaves
from jtrain.core.pytree import name as leaf_name
from jtrain.core.rows import allow_hidden_rows
from jtrain.core.types import Batch, Extra, Key, Leaf, LossFn, LossValue, Metrics, Params
from jtrain.errors import LossError
from jtrain.errors.user_code import user_code

RESERVED_METRICS = {"loss", "grad_norm", "update_norm", "skipped", "loss_scale", "rows"}
SCALAR_HIDES_ROWS = (
    "the loss returned a plain scalar; that means the mean over all rows of a batch, and this "
    "data has rows that a mask hides. Return a Mean instead: "
    '`jt.Mean.of(values_by_row, batch["mask"])`.'
)


@dataclasses.dataclass(frozen=True)
class Stateful:
    """A loss with state: `(params, extra, batch, rng) -> (Mean | Terms, Metrics, extra)`.

    In the `extra` that comes back a leaf that changes is a Mean over the rows (so that it is exact
    under any split) or an Update, and every other leaf is the one that went in.
    """

    loss: Callable[[Params, Extra, Batch, Key | None], tuple[LossValue, Metrics, Extra]]


def stateful(loss: Callable[..., tuple[LossValue, Metrics, Extra]]) -> Stateful:
    """Mark a loss that takes and returns `extra`."""
    return Stateful(loss)


class LossOutput(NamedTuple):
    """Output of a loss for some rows; all of it adds up over rows."""

    terms: Terms
    metrics: Metrics
    extra: Extra  # the structure of what went in: a Mean where a leaf changes, None elsewhere


def sum_output(output: LossOutput, psum: Callable[[Any], Any]) -> LossOutput:
    """Return the output of all rows: coefficients are kept as they are."""
    terms = output.terms
    means, metrics, extra = psum(at_least_f32((terms.means, output.metrics, output.extra)))
    return LossOutput(Terms(means, terms.coefficients), metrics, extra)


def named_means(output: LossOutput) -> dict[str, Mean]:
    """Return all means of an output, keyed by their names in messages."""
    is_mean = lambda x: isinstance(x, Mean)
    changes = jax.tree_util.tree_leaves_with_path(output.extra, is_leaf=is_mean)
    terms = {f"term {i} of the loss": mean for i, mean in enumerate(output.terms.means)}
    metrics = {f"the metric {name!r}": mean for name, mean in output.metrics.items()}
    return {**terms, **metrics, **{f"the leaf {leaf_name(p)!r} of extra": m for p, m in changes}}


@functools.lru_cache(maxsize=8)
def normalize_loss(
    loss: LossFn | Stateful, *, ragged: bool = False
) -> Callable[[Params, Extra, Batch, Key | None], LossOutput]:
    """Return `(params, extra, batch, rng) -> LossOutput` for a loss in any of its forms.

    The result is cached, so that the loss is traced once for all its users.

    Raises:
        LossError: when called, if the loss returned none of the allowed forms, or a plain scalar
            though the data is `ragged`.
    """

    def call(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> LossOutput:
        with allow_hidden_rows(ragged), user_code("the loss", batch):
            if isinstance(loss, Stateful):
                got = loss.loss(params, extra, batch, rng)
            else:
                got = loss(params, batch, rng)
        if isinstance(loss, Stateful):
            value, metrics, new = _parts(got, 3)
        else:
            value, metrics = _parts(got, 2) if type(got) is tuple else (got, {})
            new = extra
        terms, metrics = _terms(value, batch, ragged), _metrics(metrics)
        return LossOutput(terms, metrics, _changes(extra, new))

    return jax.jit(call, inline=True)


def combine(terms: Terms, weights: Sequence[Float[Array, ""]] | None = None) -> Float[Array, ""]:
    """Sum coefficient x total / weight over the terms; a term of weight 0 contributes 0.

    A weight may be negative, where rows carry signed weights. A weight of NaN makes the sum NaN.

    Args:
        weights: of all rows of the step; None: those of the terms, which have all rows.
    """
    weights = [mean.weight for mean in terms.means] if weights is None else weights
    parts = zip(terms.coefficients, terms.means, weights, strict=True)
    total = jnp.zeros((), sum_dtype(*(mean.total for mean in terms.means)))
    for coefficient, mean, weight in parts:
        total += coefficient * _divide(mean.total, weight, otherwise=0)
    return total


def update_extra(extra: Extra, changes: Extra) -> Extra:
    """Return `extra` with changed leaves divided by their weights; weight 0 keeps the old leaf.

    An `Update` computes its leaf itself.
    """

    def leaf(old: Leaf, change: Mean | None) -> Leaf:
        if change is None:
            return old
        if isinstance(change, Update):
            return change.apply(old, change.total, change.weight).astype(old.dtype)
        return _divide(change.total, change.weight, otherwise=old).astype(old.dtype)

    return jax.tree.map(leaf, extra, changes, is_leaf=lambda x: x is None)


def _divide(total: Leaf, weight: Leaf, *, otherwise: Leaf) -> Leaf:
    some = weight != 0
    return jnp.where(some, total / jnp.where(some, weight, 1), otherwise)


def _parts(got: Any, count: int) -> tuple[Any, ...]:
    form = {2: "(value, metrics)", 3: "(value, metrics, extra)"}[count]
    if type(got) is not tuple or len(got) != count:
        raise LossError(f"a loss must return {form} and returned {_kind(got)}.")
    return got


def _kind(x: Any) -> str:
    if isinstance(x, jax.Array):  # under a trace its type says nothing
        return f"an array {x.dtype}{list(x.shape)}"
    return f"a tuple of {len(x)}" if type(x) is tuple else f"a {type(x).__name__}"


def _terms(value: Any, batch: Batch, ragged: bool) -> Terms:
    if isinstance(value, Mean):
        value = Terms.of(value)
    if not isinstance(value, Terms):
        if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
            raise LossError(
                f"a loss returned {_kind(value)}; it must return a jt.Mean, a sum of "
                f"Means such as `ce + 1e-2 * z`, or a scalar array, or a tuple (one of these, "
                f"metrics)."
            )
        if value.shape:
            raise LossError(
                f"a loss returned an array of shape {value.shape}, not one number. For a value a "
                f'row: `jt.Mean.of(values, batch["mask"])`.'
            )
        if ragged:
            raise LossError(SCALAR_HIDES_ROWS)
        rows, dtype = len(batch["mask"]), sum_dtype(value)
        # NaN where a row is masked: the step's finite flag then refuses what no rule can weigh.
        total = jnp.where(batch["mask"].all(), value.astype(dtype) * rows, jnp.nan)
        value = Terms.of(Mean(total, dtype(rows)))
    for number, mean in enumerate(value.means):
        for part in (mean.total, value.coefficients[number]):
            _check_real(f"term {number} of the loss", part)
        if jnp.shape(mean.total) or jnp.shape(mean.weight):
            raise LossError(
                f"term {number} of the loss has a total of shape {jnp.shape(mean.total)} and a "
                f"weight of shape {jnp.shape(mean.weight)}; both must be sums over rows, scalars."
            )
    return value


def _check_real(what: str, number: Any) -> None:
    if jnp.iscomplexobj(number):
        raise LossError(
            f"{what} is complex, and losses and metrics are real numbers. Give a real one: "
            f"jnp.abs(values) ** 2, or values.real."
        )


def _metrics(metrics: Any) -> Metrics:
    if not isinstance(metrics, dict):
        raise LossError(f"metrics are a dict of Means; a loss returned {_kind(metrics)}.")
    for name, metric in metrics.items():
        if not isinstance(metric, Mean):
            raise LossError(
                f"the metric {name!r} is {_kind(metric)}, not a Mean, so it cannot be "
                f'added up exactly. Return `jt.Mean.of(values_by_row, batch["mask"])`.'
            )
        _check_real(f"the metric {name!r}", metric.total)
        if name in RESERVED_METRICS:
            by = "an evaluation" if name == "rows" else "the step"
            raise LossError(f"the metric {name!r} has the name of one that {by} adds; rename it.")
    return metrics


def _changes(old: Extra, new: Extra) -> Extra:
    """Return the leaves that changed, as Means, and None for those that did not."""
    is_mean = lambda x: isinstance(x, Mean)
    if jax.tree.structure(old) != jax.tree.structure(new, is_leaf=is_mean):
        raise LossError(
            f"the loss returned an `extra` of another structure: {list(named_leaves(new))}, and "
            f"was given {list(named_leaves(old))}."
        )

    def change(name: str, before: Leaf, after: Leaf) -> Mean | None:
        if is_mean(after) or after is before:
            return after if is_mean(after) else None
        raise LossError(
            f"the leaf {name!r} of `extra` changes but is not a Mean. Return "
            f"`jt.Mean(new * rows, rows)` with the rows it was computed from, or the leaf as it "
            f"was. (Take a jit off the loss: what went through it is another array.) For the "
            f"statistics of batch norm return `jtrain.models.mean_of_slices(extra, new, "
            f"batch['mask'])` in the place of `new`, and declare rows_interact=\"batch\"."
        )

    names = jax.tree.unflatten(jax.tree.structure(old), list(named_leaves(old)))
    return jax.tree.map(change, names, old, new)
