"""Preference losses: of pairs of responses, or of responses that are liked or not.

They take the log probability of each response under the model and under a frozen reference, summed
over the response's tokens (`response_log_probs`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.losses.shapes import check_labels_shape, check_same_shape


def token_log_probs(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], real: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """Return the log probability of each target, and 0 where `real` is false.

    Raises:
        LossError: if the shapes do not match.
    """
    check_labels_shape(logits, targets, real)
    return jnp.where(real, -cross_entropy_per_label(logits, targets), 0)


def response_log_probs(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], real: Bool[Array, "b t"]
) -> Float[Array, "b"]:
    """Return the log probability of each row's real targets, summed over them.

    Raises:
        LossError: if the shapes do not match.
    """
    return token_log_probs(logits, targets, real).sum(-1)


def dpo(
    chosen: Float[Array, "b"],
    rejected: Float[Array, "b"],
    reference_chosen: Float[Array, "b"],
    reference_rejected: Float[Array, "b"],
    mask: Bool[Array, "b"],
    *,
    beta: float = 0.1,
    smoothing: float = 0.0,
) -> tuple[Mean, Metrics]:
    """Return direct preference optimization: -log sigmoid(beta x margin), in nats a pair.

    The margin is the log ratio of the chosen response to the reference less that of the rejected
    one. `smoothing` is the share of pairs whose labels are taken to be the wrong way round. The
    metric `accuracy` is the share of pairs with a margin above 0.

    Raises:
        LossError: if `beta` or `smoothing` is out of its range, or the shapes differ.

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7; smoothing: Mitchell 2023, "A note
    on DPO with noisy preferences".
    """
    _check_beta(beta)
    if not 0 <= smoothing < 0.5:
        raise LossError(
            f"smoothing {smoothing} is to be the share of pairs with the wrong label, and with "
            f"half of them wrong nothing can be learned. Give smoothing=0, or less than 0.5."
        )
    margin, metrics = _margin(chosen, rejected, reference_chosen, reference_rejected, mask)
    right, wrong = jax.nn.log_sigmoid(beta * margin), jax.nn.log_sigmoid(-beta * margin)
    return Mean.of(-(1 - smoothing) * right - smoothing * wrong, mask), metrics


def ipo(
    chosen: Float[Array, "b"],
    rejected: Float[Array, "b"],
    reference_chosen: Float[Array, "b"],
    reference_rejected: Float[Array, "b"],
    mask: Bool[Array, "b"],
    *,
    beta: float = 0.1,
) -> tuple[Mean, Metrics]:
    """Return identity preference optimization: (margin - 1 / (2 beta)) squared, a pair.

    Margin and metrics are those of `dpo`; the margin has a goal, so that pairs of one clear label
    do not drive it to infinity. `beta` is the paper's tau.

    Raises:
        LossError: if `beta` is not above 0, or the shapes differ.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17.
    """
    _check_beta(beta)
    margin, metrics = _margin(chosen, rejected, reference_chosen, reference_rejected, mask)
    return Mean.of(jnp.square(margin - 1 / (2 * beta)), mask), metrics


def kto(
    response: Float[Array, "b"],
    reference: Float[Array, "b"],
    desirable: Bool[Array, "b"],
    mismatched: Float[Array, "b"],
    reference_mismatched: Float[Array, "b"],
    mask: Bool[Array, "b"],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Mean, Metrics]:
    """Return Kahneman-Tversky optimization of responses that are desirable or not, a row.

    For the log ratio r of a response to the reference, the loss is `1 - sigmoid(beta x (r - z))`
    times `desirable_weight`, or, where it is not desirable, `1 - sigmoid(beta x (z - r))` times
    `undesirable_weight`. z, the mean log ratio of mismatched responses (a prompt with the response
    of another row), at least 0, estimates the divergence from the reference and has no gradient. z
    is a mean over all rows: the experiment declares `rows_interact="batch"`.

    Raises:
        LossError: if `beta` is not above 0, or the shapes differ.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equation 8.
    """
    _check_beta(beta)
    check_same_shape(response, reference, mask, ("response", "reference"))
    check_same_shape(mismatched, reference_mismatched, mask, ("mismatched", "its reference"))
    if desirable.dtype != bool:
        raise LossError(
            f"desirable says of each row whether its response is liked, and is {desirable.dtype}, "
            f"of which -1 would count as liked too. Give desirable > 0."
        )
    ratio = _ratio(response, reference, mask)
    other = _ratio(mismatched, reference_mismatched, mask)
    rows = jnp.maximum(mask.sum(), 1).astype(other.dtype)
    z = jax.lax.stop_gradient(jnp.maximum(other.sum() / rows, 0))
    sign = jnp.where(desirable, 1.0, -1.0)
    weight = jnp.where(desirable, desirable_weight, undesirable_weight)
    values = weight * (1 - jax.nn.sigmoid(beta * sign * (ratio - z)))
    metrics = {
        "reward_desirable": Mean.of(beta * ratio, mask & desirable),
        "reward_undesirable": Mean.of(beta * ratio, mask & ~desirable),
        "divergence": Mean.of(jnp.broadcast_to(z, mask.shape), mask),
    }
    return Mean.of(values, mask), metrics


def _margin(
    chosen: Array, rejected: Array, reference_chosen: Array, reference_rejected: Array, mask: Array
) -> tuple[Array, Metrics]:
    check_same_shape(chosen, rejected, mask, ("chosen", "rejected"))
    check_same_shape(chosen, reference_chosen, mask, ("chosen", "its reference"))
    check_same_shape(rejected, reference_rejected, mask, ("rejected", "its reference"))
    better = _ratio(chosen, reference_chosen, mask)
    worse = _ratio(rejected, reference_rejected, mask)
    margin = better - worse
    metrics = {
        "accuracy": Mean.of((margin > 0).astype(jnp.float32), mask),
        "margin": Mean.of(margin, mask),
        "ratio_chosen": Mean.of(better, mask),
        "ratio_rejected": Mean.of(worse, mask),
    }
    return margin, metrics


def _ratio(own: Array, reference: Array, mask: Array) -> Array:
    """Return the log ratio of a row; the reference has no gradient, and masked rows may be NaN."""
    fixed = jax.lax.stop_gradient(at_least_f32(reference))
    return jnp.where(mask, at_least_f32(own), 0) - jnp.where(mask, fixed, 0)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise LossError(
            f"beta {beta} is the strength of the pull to the reference, and must be above 0: "
            f"beta=0.1 is usual."
        )
