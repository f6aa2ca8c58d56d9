"""Routers: balanced use of experts by a loss or by biases, and bounded logits."""

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.mean import Mean, Statistic, Terms, Update
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_mask


def z_loss(logits: Float[Array, "*b c"], mask: Bool[Array, "*b"]) -> Mean:
    """Return the square of the log of the softmax's denominator, where `mask` is true.

    Add the term with a coefficient: `value + 1e-4 * z_loss(logits, mask)`.

    Raises:
        LossError: if the mask has another shape.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5.
    """
    check_mask(mask, logits.shape[:-1])
    wide = jnp.where(mask[..., None], at_least_f32(logits), 0)  # masked rows may be NaN
    return Mean.of(jnp.square(jax.nn.logsumexp(wide, -1)), mask)


Group: TypeAlias = Literal["row", "batch"]


def balance(
    logits: Float[Array, "b l t e"],
    real: Bool[Array, "b t"],
    *,
    top_k: int,
    group: Group = "row",
) -> Mean:
    """Return the balance loss: 1 if all experts are used equally, `e / top_k` if only k are used.

    For a group of tokens the loss is the sum over experts of e x the expert's share of the choices
    x its mean probability, averaged over layers. As a product of means it depends on the group:

    - `row`: the real tokens of a row; exact under any split of the batch.
    - `batch`: all real tokens of the batch. Rows are coupled: the experiment declares
      `rows_interact="batch"`.

    Each group is weighted by its real tokens. Only the probabilities have a gradient.

    Raises:
        LossError: if there are fewer experts than `top_k`.

    Source: Fedus et al. 2021 (Switch), https://arxiv.org/abs/2101.03961, equations 4 to 6, with
    the shares of all top-k choices together, as in DeepSeek-V2, https://arxiv.org/abs/2405.04434.
    """
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise LossError(
            f"top_k={top_k} of {experts} experts is not in 1 .. {experts}. Give the model's own, "
            f"model.experts.top_k."
        )
    mask = real[:, None, :, None]
    logits = jnp.where(mask, at_least_f32(logits), 0)  # unreal tokens may be NaN
    counts = expert_choices(logits, real, top_k)
    chances = jnp.where(mask, jax.nn.softmax(logits, -1), 0)
    over = (2,) if group == "row" else (0, 2)
    tokens = real.sum(1 if group == "row" else None, dtype=jnp.float32)  # b, or one for all
    uses, chance = counts.sum(over), chances.sum(over)  # (b) l e
    # uses and chance are divided by the tokens of the group, and the product is weighted by them.
    per_layer = experts / top_k * (uses * chance).sum(-1) / jnp.maximum(tokens, 1)[..., None]
    return Mean(per_layer.mean(-1).sum(), tokens.sum())


def top_experts(scores: Float[Array, "*b e"], top_k: int) -> Int[Array, "*b k"]:
    """Return the `top_k` experts of the highest scores, the highest first; of equals the first."""
    # A sort: the compiler cannot split lax.top_k, and would gather the scores of all rows.
    order = jnp.argsort(jax.lax.stop_gradient(scores), stable=True, descending=True)
    return order[..., :top_k]


def expert_choices(
    scores: Float[Array, "b l t e"], real: Bool[Array, "b t"], top_k: int
) -> Float[Array, "b l t e"]:
    """Return 1 where a real token chooses an expert, and 0 elsewhere."""
    chosen = jax.nn.one_hot(top_experts(scores, top_k), scores.shape[-1]).sum(-2)
    return jnp.where(real[:, None, :, None], chosen, 0)


@dataclasses.dataclass(frozen=True)
class BiasStep:
    """A step of the biases of experts, l e, against their loads: the tokens that chose each."""

    rate: float

    def __call__(self, bias: Array, load: Array, tokens: Array) -> Array:
        """Return the next biases."""
        del tokens
        mean = load.astype(jnp.int32).sum(-1, keepdims=True) / load.shape[-1]
        return bias + self.rate * jnp.sign(mean - load)


def bias_update(choices: Float[Array, "b l t e"], real: Bool[Array, "b t"], rate: float) -> Update:
    """Return the change of the biases that balance experts without a loss, for the loss's `extra`.

    An expert's load is the number of real tokens that chose it in all of a step's batch. Once a
    step `bias += rate * sign(mean load - load)` at each layer. Loads are whole numbers, so every
    split of the batch gives the same biases, up to 2^24 tokens an expert.

    Args:
        choices: `expert_choices` of the scores with the biases.

    Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1; DeepSeek-V3,
    https://arxiv.org/abs/2412.19437, section 2.1.2.
    """
    return Update(choices.sum((0, 2)), real.sum(dtype=jnp.float32), BiasStep(rate))


def max_violation(update: Update) -> Statistic:
    """Return the metric of a `bias_update`: the mean over layers of max load / mean load - 1.

    Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664, equation 4.
    """
    return Statistic(update.total, update.weight, _max_violation)


def _max_violation(load: np.ndarray, tokens: np.ndarray) -> float:
    return float((load.max(-1) / load.mean(-1) - 1).mean()) if tokens else np.nan


def with_router(
    value: Mean | Terms,
    logits: Float[Array, "b l t e"],
    real: Bool[Array, "b t"],
    *,
    top_k: int,
    group: Group,
    uneven: float,
    z: float,
) -> tuple[Terms, Metrics]:
    """Return `value + uneven * balance + z * router_z`, and both terms as metrics.

    `router_z` is the mean over layers and real tokens of the square of the log of the softmax's
    denominator.

    Source of `router_z`: Zoph et al. 2022 (ST-MoE), https://arxiv.org/abs/2202.08906, equation 5.
    """
    use = balance(logits, real, top_k=top_k, group=group)
    size = z_loss(logits, jnp.broadcast_to(real[:, None], logits.shape[:-1]))
    return value + uneven * use + z * size, {"balance": use, "router_z": size}
