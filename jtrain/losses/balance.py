"""Losses of a router: balanced use of its experts, and bounded logits."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean, Terms
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
    # A sort: the compiler cannot split lax.top_k, and would gather the logits of all rows.
    order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
    chosen = order[..., :top_k]
    counts = jnp.where(mask, jax.nn.one_hot(chosen, experts).sum(-2), 0)  # b l t e
    chances = jnp.where(mask, jax.nn.softmax(logits, -1), 0)
    over = (2,) if group == "row" else (0, 2)
    tokens = real.sum(1 if group == "row" else None, dtype=jnp.float32)  # b, or one for all
    uses, chance = counts.sum(over), chances.sum(over)  # (b) l e
    # uses and chance are divided by the tokens of the group, and the product is weighted by them.
    per_layer = experts / top_k * (uses * chance).sum(-1) / jnp.maximum(tokens, 1)[..., None]
    return Mean(per_layer.mean(-1).sum(), tokens.sum())


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
