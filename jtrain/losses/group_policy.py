"""GRPO and its variants: policy gradients whose baseline is a group of answers to one prompt.

Advantages need complete groups: `advantages_by_row` makes them on the device, where a row is a
group, `group_advantages` on the host, before a batch is split. In the losses every answer is
independent, so that any split of a batch gives one result.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import DataError, LossError
from jtrain.losses.shapes import check_same_shape


def group_advantages(
    rewards: Float[np.ndarray, "b"], groups: Int[np.ndarray, "b"], *, by_deviation: bool = True
) -> Float[np.ndarray, "b"]:
    """Return each reward less the mean of its group, on the host.

    `by_deviation` divides by the group's standard deviation (of a sample, as in GRPO); Dr. GRPO
    does not. A group whose rewards are all equal has advantages of 0.

    Raises:
        DataError: if a group has one answer, which is its own baseline.
    """
    names, at, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if (counts < 2).any():
        raise DataError(
            f"group {names[counts < 2][0]} has one answer, which is its own baseline, so that its "
            f"advantage is always 0. Sample at least 2 answers a prompt; 8 to 64 are usual."
        )
    exact = np.asarray(rewards, np.float64)
    means = np.bincount(at, exact) / counts
    advantages = exact - means[at]
    if by_deviation:
        deviations = np.sqrt(np.bincount(at, advantages**2) / (counts - 1))
        advantages = np.where(
            deviations[at] > 1e-9, advantages / np.maximum(deviations[at], 1e-9), 0
        )
    return advantages.astype(np.float32)


def advantages_by_row(
    rewards: Float[Array, "b g"], *, by_deviation: bool = True
) -> Float[Array, "b g"]:
    """Return each reward less the mean of its row, where a row is a group, on the device.

    As `group_advantages`, for a loss that samples the answers itself.

    Raises:
        LossError: if a group has one answer.
    """
    group = rewards.shape[1]
    if group < 2:
        raise LossError(
            "a group has one answer, which is its own baseline, so that its advantage is always 0. "
            "Sample at least 2 answers a prompt; 8 to 64 are usual."
        )
    wide = at_least_f32(rewards)
    gaps = wide - wide[:, :1]  # exactly 0 where all are equal
    advantages = gaps - gaps.mean(1, keepdims=True)
    if not by_deviation:
        return advantages
    variance = jnp.square(advantages).sum(1, keepdims=True) / (group - 1)
    return jnp.where(variance > 0, advantages / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def grpo(
    log_probs: Float[Array, "b t"],
    old: Float[Array, "b t"],
    advantages: Float[Array, "b"],
    real: Bool[Array, "b t"],
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    reference: Float[Array, "b t"] | None = None,
    beta: float = 0.0,
) -> tuple[Mean, Metrics]:
    """Return group relative policy optimization: the mean over answers of the mean over tokens.

    A token's ratio to the model that sampled it, times the answer's advantage, is clipped below
    `1 - clip[0]` and above `1 + clip[1]`.

    Args:
        log_probs: of the answers' tokens, under the model that is trained.
        old: the same under the model that sampled them.
        advantages: of the answers, by `group_advantages` or `advantages_by_row`.
        real: which tokens belong to the answer.
        reference: log probabilities under a frozen model, towards which `beta` pulls.
        beta: weight of the estimated divergence from the reference, `r - log r - 1` for
            r = reference / model.

    Raises:
        LossError: if the shapes differ, or `beta` is given without a reference or the reverse.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, equations 3 and 4.
    """
    values, metrics = _token_values(log_probs, old, advantages, real, clip, reference, beta)
    return _mean_of_answers(values, real), metrics


def dr_grpo(
    log_probs: Float[Array, "b t"],
    old: Float[Array, "b t"],
    advantages: Float[Array, "b"],
    real: Bool[Array, "b t"],
    *,
    tokens: int,
    clip: tuple[float, float] = (0.2, 0.2),
    reference: Float[Array, "b t"] | None = None,
    beta: float = 0.0,
) -> tuple[Mean, Metrics]:
    """Return GRPO without its bias by length: the sum over tokens / `tokens`, mean over answers.

    Arguments and errors are those of `grpo`; the advantages are made with `by_deviation=False`.

    Args:
        tokens: a constant, such as the most tokens of an answer.

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2.
    """
    values, metrics = _token_values(log_probs, old, advantages, real, clip, reference, beta)
    answers = real.any(-1)
    return Mean.of(values.sum(-1) / tokens, answers), metrics


def dapo(
    log_probs: Float[Array, "b t"],
    old: Float[Array, "b t"],
    advantages: Float[Array, "b"],
    real: Bool[Array, "b t"],
    *,
    clip: tuple[float, float] = (0.2, 0.28),
    reference: Float[Array, "b t"] | None = None,
    beta: float = 0.0,
) -> tuple[Mean, Metrics]:
    """Return GRPO with every token of the batch counted alike, and more room above.

    Arguments and errors are those of `grpo`. The paper divides by the tokens of a group; here it
    is by those of the batch.

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 8.
    """
    values, metrics = _token_values(log_probs, old, advantages, real, clip, reference, beta)
    return Mean.of(values, real), metrics


def gspo(
    log_probs: Float[Array, "b t"],
    old: Float[Array, "b t"],
    advantages: Float[Array, "b"],
    real: Bool[Array, "b t"],
    *,
    clip: tuple[float, float] = (3e-4, 4e-4),
) -> tuple[Mean, Metrics]:
    """Return GRPO with one ratio for an answer: the geometric mean of its tokens' ratios.

    Arguments and errors are those of `grpo`.

    Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7.
    """
    _check(log_probs, old, advantages, real)
    log_ratio = _log_ratio(log_probs, old, real)
    ratio = jnp.exp(log_ratio.sum(-1) / jnp.maximum(real.sum(-1), 1).astype(log_ratio.dtype))
    values, clipped = _clipped(ratio, advantages, clip)
    answers = real.any(-1)
    return Mean.of(values, answers), {"clipped": Mean.of(clipped, answers)}


def _mean_of_answers(values: Array, real: Array) -> Mean:
    tokens = jnp.maximum(real.sum(-1), 1).astype(values.dtype)
    return Mean.of(values.sum(-1) / tokens, real.any(-1))


def _token_values(
    log_probs: Array,
    old: Array,
    advantages: Array,
    real: Array,
    clip: tuple[float, float],
    reference: Array | None,
    beta: float,
) -> tuple[Array, Metrics]:
    """Return the loss of each token, 0 where there is none, and metrics."""
    _check(log_probs, old, advantages, real)
    if (reference is None) != (beta == 0):
        found = "no reference" if reference is None else "a reference"
        raise LossError(
            f"beta={beta} is the weight of the divergence from a reference, and there is {found}. "
            f"Give both, or leave both out."
        )
    ratio = jnp.exp(_log_ratio(log_probs, old, real))
    values, clipped = _clipped(ratio, advantages[:, None], clip)
    metrics = {"clipped": Mean.of(clipped, real)}
    if reference is not None:
        fixed = jax.lax.stop_gradient(at_least_f32(reference))
        gap = jnp.where(real, fixed, 0) - jnp.where(real, at_least_f32(log_probs), 0)
        divergence = jnp.expm1(gap) - gap  # exp(gap) - 1 loses all digits where both agree
        values = values + beta * divergence
        metrics["divergence"] = Mean.of(divergence, real)
    return jnp.where(real, values, 0), metrics


def _clipped(ratio: Array, advantages: Array, clip: tuple[float, float]) -> tuple[Array, Array]:
    """Return minus the smaller of the plain and the clipped product, and where that is clipped."""
    below, above = clip
    plain, bounded = ratio * advantages, jnp.clip(ratio, 1 - below, 1 + above) * advantages
    return -jnp.minimum(plain, bounded), (bounded < plain).astype(jnp.float32)


def _log_ratio(log_probs: Array, old: Array, real: Array) -> Array:
    fixed = jax.lax.stop_gradient(at_least_f32(old))
    return jnp.where(real, at_least_f32(log_probs), 0) - jnp.where(real, fixed, 0)


def _check(log_probs: Array, old: Array, advantages: Array, real: Array) -> None:
    check_same_shape(log_probs, old, real[:, 0], ("log_probs", "old"))
    if real.shape != log_probs.shape or advantages.shape != real.shape[:1]:
        raise LossError(
            f"log_probs have the shape {log_probs.shape}, `real` {real.shape} and advantages "
            f"{advantages.shape}. Give `real` one value a token and advantages one a row."
        )
