"""What keeps the experts of a mixture in use, and their router's logits from drifting."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean, Terms
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.z_loss import z_loss

Group: TypeAlias = Literal["row", "batch"]


def balance(
    logits: Float[Array, "b l t e"],
    real: Bool[Array, "b t"],
    *,
    top_k: int,
    group: Group = "row",
) -> Mean:
    """How unevenly the experts are used: 1 where all are used alike, `e / top_k` where k do it all.

    Of a group of tokens it is the sum over experts of e x the share of the choices that an expert
    got x its mean chance, layer by layer, and then the mean over layers. It multiplies means, so
    that it depends on the group over which they are taken:

    - `row`: the real tokens of a row; exact under any split of the batch.
    - `batch`: all real tokens of the batch. Rows meet: the experiment says `couples="batch"`.

    Each group counts by its real tokens. The gradient goes through the chances alone.

    Raises:
        LossError: if there are fewer experts than `top_k`.

    Source: Fedus et al. 2021 (Switch), https://arxiv.org/abs/2101.03961, equations 4 to 6, with
    the shares of all top-k choices together, as in DeepSeek-V2, https://arxiv.org/abs/2405.04434.
    """
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise LossError(
            f"top_k={top_k} of {experts} experts is no choice. Give the model's own, "
            f"model.experts.top_k."
        )
    seen = real[:, None, :, None]
    logits = jnp.where(seen, at_least_f32(logits), 0)  # what is not real may be NaN
    # Sorted, for the compiler splits no lax.top_k: it would gather the logits of all rows.
    order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
    chosen = order[..., :top_k]
    took = jnp.where(seen, jax.nn.one_hot(chosen, experts).sum(-2), 0)  # b l t e
    chances = jnp.where(seen, jax.nn.softmax(logits, -1), 0)
    over = (2,) if group == "row" else (0, 2)
    tokens = real.sum(1 if group == "row" else None, dtype=jnp.float32)  # b, or one for all
    uses, chance = took.sum(over), chances.sum(over)  # (b) l e
    # Both over the tokens of the group, and the product times them.
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
    """`value + uneven * balance + z * router_z`, and both terms as they are, by these names.

    `router_z` is the square of the log of the softmax's denominator, the mean over layers and real
    tokens.

    Source of that: Zoph et al. 2022 (ST-MoE), https://arxiv.org/abs/2202.08906, equation 5.
    """
    use = balance(logits, real, top_k=top_k, group=group)
    size = z_loss(logits, jnp.broadcast_to(real[:, None], logits.shape[:-1]))
    return value + uneven * use + z * size, {"balance": use, "router_z": size}
