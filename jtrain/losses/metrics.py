"""Metrics: functions of outputs, targets, a mask and weights, whose sums are exact in any split.

`jt.fit` and `jt.evaluate` take names and functions: `metrics=["auc", jt.metrics.top_k(5)]`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jtrain.core.mean import Mean
from jtrain.core.mean import Statistic as Statistic
from jtrain.core.pytree import at_least_f32
from jtrain.errors import ConfigError, LossError
from jtrain.errors.spelling import did_you_mean
from jtrain.errors.user_code import check_takes
from jtrain.losses.next_token import perplexity as perplexity
from jtrain.losses.shapes import check_labels_shape, check_same_shape

Logits: TypeAlias = Float[Array, "*b c"]
Labels: TypeAlias = Integer[Array, "*b"]
Mask: TypeAlias = Bool[Array, "*b"]
Weights: TypeAlias = Shaped[Array, "*b"] | None
Metric: TypeAlias = Callable[[Any, Any, Any, Any], Mean]
"""`(outputs, targets, mask, weights) -> Mean`, where mask and weights have the shape of the
targets, and weights may be None. Of a classifier, outputs are logits *b c and targets classes *b;
of `jt.binary_classifier` the logits of both classes; of `jt.language_model` those of each token."""

BINS = 8192  # of the scores of `auc`
MOST_CLASSES = 4096  # of a confusion matrix: 64 MB
GRIDS = tuple(2.0**power for power in range(96, -121, -8))


def find_metrics(
    given: Sequence[str | Metric], kind: Literal["classes", "numbers"]
) -> dict[str, Metric]:
    """Return metrics by name; a function has its own name.

    Args:
        kind: what the loss predicts.

    Raises:
        ConfigError: for an unknown name, or a metric of the other kind.
    """
    if isinstance(given, str) or callable(given):
        raise ConfigError(f"metrics= is a list: write metrics=[{given!r}].")
    found: dict[str, Metric] = {}
    for metric in given:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
        ready = any(metric is x for each in METRICS.values() for x in each.values())
        if not name or name == "<lambda>":
            raise ConfigError(
                f"a metric is a name such as 'accuracy' or a function with a name, and this is "
                f"{metric!r}. Write def my_metric(outputs, targets, mask, weights): ..."
            )
        if isinstance(metric, str) or ready:
            found[name] = _ready_metric(name, kind)
        else:
            check_takes(metric, ("outputs", "targets", "mask", "weights"), f"the metric {name}")
            found[name] = metric
    return found


def _ready_metric(name: str, kind: str) -> Metric:
    if (number := re.fullmatch(r"top_(\d+)", name)) and kind == "classes":
        return top_k(int(number[1]))
    known = METRICS[kind]
    if name in known:
        return known[name]
    of = next(
        (f" is of {k}, and the loss predicts {kind}: it" for k in METRICS if name in METRICS[k]), ""
    )
    names = [*known, *(["top_5"] if kind == "classes" else [])]
    raise ConfigError(
        f"the metric {name!r}{of} is not one of {', '.join(names)}, or a function of (outputs, "
        f"targets, mask, weights){did_you_mean(name, names)}"
    )


def accuracy(
    logits: Logits,
    labels: Labels,
    mask: Mask,
    weights: Weights = None,
    *,
    top: int = 1,
) -> Mean:
    """Return the share of labels among the `top` greatest logits, where `mask` is true.

    Of equal logits the first wins and NaN is the greatest, as in `argmax`. A label outside 0 .. c-1
    is a miss.

    Raises:
        LossError: if `top` is not in 1 .. c, or the shapes do not match.
    """
    check_labels_shape(logits, labels, mask)
    classes = logits.shape[-1]
    if not 1 <= top <= classes:
        raise LossError(
            f"accuracy among the first {top} of {classes} classes: give top in 1 .. {classes} "
            f"(top={min(max(top, 1), classes)}), as a metric 'top_{min(max(top, 1), classes)}'."
        )
    if top == 1:
        return Mean.of((logits.argmax(-1) == labels).astype(jnp.float32), mask, weights)
    labels = labels.astype(jnp.int32)  # 8 bits hold no class from 256 on
    known = (labels >= 0) & (labels < classes)
    logits = jnp.where(jnp.isnan(logits), jnp.inf, logits)  # no number is ahead of NaN
    own = jnp.take_along_axis(logits, labels.clip(0, classes - 1)[..., None], -1)
    index = jnp.expand_dims(jnp.arange(classes, dtype=jnp.int32), range(labels.ndim))
    ahead = (logits > own) | ((logits == own) & (index < labels[..., None]))
    hits = known & (ahead.sum(-1) < top)
    return Mean.of(hits.astype(jnp.float32), mask, weights)


@functools.cache
def top_k(k: int) -> Metric:
    """Return the metric `top_K`, the share of labels among the `k` greatest logits.

    Raises:
        ConfigError: if `k` is not positive.
    """
    if k < 1:
        raise ConfigError(f"top_k({k}) counts nothing: write top_k(5).")

    def hits(logits: Any, labels: Any, mask: Any, weights: Any = None) -> Mean:
        return accuracy(logits, labels, mask, weights, top=k)

    hits.__name__ = f"top_{k}"
    return hits


def confusion(logits: Logits, labels: Labels, mask: Mask, weights: Weights = None) -> Statistic:
    """Return the counts (label, likeliest class), c c, of the rows where `mask` is true.

    A row counts `weights` times. Counts are exact up to 2^24 a batch. A label outside 0 .. c-1 is
    in no count.

    Raises:
        LossError: if the shapes do not match, or there are more than 4096 classes.
    """
    return _of_confusion(_counts, logits, labels, mask, weights)


def f1(logits: Logits, labels: Labels, mask: Mask, weights: Weights = None) -> Statistic:
    """Return the F1 score of class 1 of two: 2 tp / (2 tp + fp + fn), NaN of no row.

    Raises:
        LossError: if the shapes do not match, or there are more classes.
    """
    _check_two_classes(logits, "f1", ' For the mean over classes write "f1_macro".')
    return _of_confusion(_f1, logits, labels, mask, weights)


def f1_macro(logits: Logits, labels: Labels, mask: Mask, weights: Weights = None) -> Statistic:
    """Return the mean of the F1 scores of the classes that are labelled or predicted.

    Raises:
        LossError: as `confusion`.
    """
    return _of_confusion(_f1_macro, logits, labels, mask, weights)


def _of_confusion(
    finish: Callable[..., Any], logits: Any, labels: Any, mask: Any, weights: Any
) -> Statistic:
    check_labels_shape(logits, labels, mask)
    count = logits.shape[-1]
    if count > MOST_CLASSES:
        raise LossError(
            f"counts of {count} x {count} classes take {4e-9 * count**2:.1f} GB. Metrics of a "
            f'confusion matrix take up to {MOST_CLASSES}: write metrics=["accuracy", "top_5"].'
        )
    classes = jnp.expand_dims(jnp.arange(count, dtype=jnp.int32), range(mask.ndim))
    each = _weight_of_each(mask, weights)
    true = (labels.astype(jnp.int32)[..., None] == classes).astype(each.dtype) * each[..., None]
    predicted = logits.argmax(-1).astype(jnp.int32)
    one_hot = (predicted[..., None] == classes).astype(each.dtype)
    flat = lambda x: x.reshape(-1, count)
    # Accelerators would round the weights to fewer bits.
    total = jnp.matmul(flat(true).T, flat(one_hot), precision="highest")
    return Statistic(total, each.sum(), finish)


def _weight_of_each(mask: Any, weights: Any) -> Any:
    """Return how many times each target counts, 0 where it is masked."""
    each = mask if weights is None else jnp.where(mask, weights, jnp.zeros_like(weights))
    return each.astype(jnp.float32)


def _counts(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    del weight
    whole = total.astype(np.int64)
    return whole if np.array_equal(whole, total) else total


def _f1(total: np.ndarray, weight: np.ndarray) -> float:
    del weight
    return _ratio(2 * total[1, 1], 2 * total[1, 1] + total[0, 1] + total[1, 0])


def _f1_macro(total: np.ndarray, weight: np.ndarray) -> float:
    del weight
    either = total.sum(0) + total.sum(1)  # 2 tp + fp + fn of each class
    scores = 2 * total.diagonal()[either > 0] / either[either > 0]
    return _ratio(scores.sum(), len(scores))


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else np.nan


def _check_two_classes(logits: Any, name: str, advice: str) -> None:
    if logits.shape[-1:] != (2,):
        raise LossError(
            f"{name} is of two classes, and the logits have the shape {logits.shape}.{advice}"
        )


def exp_of_mean(nats: Mean) -> Statistic:
    """Return the perplexity of a loss, whose sums these are."""
    return Statistic(nats.total, nats.weight, _perplexity)


def _perplexity(total: np.ndarray, weight: np.ndarray) -> float:
    return perplexity(Mean(total, weight))


def auc(logits: Logits, labels: Labels, mask: Mask, weights: Weights = None) -> Statistic:
    """Return the area under the ROC curve: how often class 1 has the greater score, ties half.

    The score z is the logit of class 1 minus that of class 0. Scores are counted in 8192 bins that
    are (1 + |z|)^2 / 4096 wide, and those of one bin are ties: the area is the same in any split,
    and off from that of the ranks by at most half the share of pairs in one bin (5e-6 on 10,000
    rows of scores of deviation 2). NaN if a class has no row. Several labels a row are
    counted together.

    Raises:
        LossError: if there are not two classes, or the shapes do not match.
    """
    _check_two_classes(
        logits, "auc", ' For more classes write "accuracy", "f1_macro" or "confusion".'
    )
    check_labels_shape(logits, labels, mask)
    wide = at_least_f32(logits)
    score = jnp.where(mask, wide[..., 1] - wide[..., 0], 0)
    place = score.clip(-1e30, 1e30)
    place = place / (1 + abs(place))  # -1 .. 1
    index = ((place + 1) * (BINS / 2)).astype(jnp.int32).clip(0, BINS - 1)
    each = jnp.where(jnp.isnan(score), jnp.nan, _weight_of_each(mask, weights))
    by_class = jnp.stack([each * (labels == i).astype(each.dtype) for i in (0, 1)], -1)
    total = jax.ops.segment_sum(by_class.reshape(-1, 2), index.ravel(), BINS)
    return Statistic(total, each.sum(), _auc)


def _auc(total: np.ndarray, weight: np.ndarray) -> float:
    del weight
    negative, positive = total.T
    below = negative.cumsum() - negative / 2
    return _ratio((positive * below).sum(), positive.sum() * negative.sum())


def r2(
    outputs: Float[Array, "b *n"],
    targets: Float[Array, "b *n"],
    mask: Bool[Array, "b *n"],
    weights: Shaped[Array, "b *n"] | None = None,
) -> Statistic:
    """Return R squared: 1 - sum (y - p)^2 / sum (y - mean of y)^2; of several targets the mean.

    NaN if a target is constant. The sums of y and y^2 are exact, up to the rounding of a weight
    that is no whole number: a mean of y far above its deviation costs no digits, in any split.

    Raises:
        LossError: if the shapes differ.
    """
    check_same_shape(outputs, targets, mask[:, *[0] * (mask.ndim - 1)])
    by_row = lambda x: x.reshape(len(x), -1)
    each, real = by_row(_weight_of_each(mask, weights)), by_row(mask)
    y, p = (jnp.where(real, by_row(x).astype(jnp.float32), 0) for x in (targets, outputs))
    high = jax.lax.reduce_precision(y, 8, 11)
    low = y - high  # both have 12 bits, so that float32 holds their products
    sums = _exact_sums(each[None] * jnp.stack([y, high * high, 2 * high * low, low * low]))
    rest = jnp.stack([(each * jnp.square(y - p)).sum(0), each.sum(0)])
    return Statistic(jnp.concatenate([*sums, rest]), each.sum(), _r2)


def _exact_sums(x: Float[Array, "s b n"]) -> Float[Array, "k s n"]:
    """Return sums over rows whose sum over k is that of x: of the digits on each of 28 grids.

    A digit has 8 bits, so that float32 adds up 65,536 of a grid without rounding, in any order.

    Source: the accumulator of Kulisch 1986, "The arithmetic of the digital computer".
    """
    grids = jnp.array(GRIDS, jnp.float32)[:, None, None, None]
    x = x[None]
    down_to = jnp.where(abs(x) < 2.0**24 * grids, jnp.trunc(x / grids) * grids, x)
    return jnp.diff(down_to, axis=0, prepend=jnp.zeros_like(down_to[:1])).sum(2)


def _r2(total: np.ndarray, weight: np.ndarray) -> float:
    del weight
    *sums, error, weights = total
    y, *squares = np.reshape(sums, (len(GRIDS), 4, -1)).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = sum(squares) - y**2 / weights
        return float(np.mean(np.where(spread > 0, 1 - error / spread, np.nan)))


METRICS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "classes": {
        "accuracy": accuracy,
        "auc": auc,
        "confusion": confusion,
        "f1": f1,
        "f1_macro": f1_macro,
        "f1_micro": accuracy,  # of one label for each
        "perplexity": perplexity,
    },
    "numbers": {"r2": r2},
}
"""Metrics by what the loss predicts. `perplexity` alone is a function of the loss."""
