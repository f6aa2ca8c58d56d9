"""Dropout that a row draws for itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jtrain.errors import LossError


def drop(
    x: Float[Array, "b *s"],
    rate: float,
    keys: Shaped[Array, "b"] | None,
    *,
    site: int | Int[Array, ""] = 0,
    order: np.ndarray | None = None,
) -> Float[Array, "b *s"]:
    """`x` with each number zeroed with chance `rate` and the others scaled by 1 / (1 - rate).

    A row draws from its own key (`jtrain.row_keys`), so what it drops depends on no device,
    microbatch or neighbour. `x` itself where `keys` is None or `rate` is 0.

    Args:
        site: tells apart the places of one model that drop.
        order: which positions those of `x` are, where they are not in their own order; a position
            drops the same wherever it stands.
    """
    if keys is None or rate == 0:
        return x

    def kept(key):
        mask = jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:])
        return mask if order is None else mask[order]

    return jnp.where(jax.vmap(kept)(keys), x / (1 - rate), jnp.zeros((), x.dtype))


def drawn_from(
    keys: Shaped[Array, "b"] | None, rate: float, *, train: bool
) -> Shaped[Array, "b"] | None:
    """The keys that a model drops by: None where it drops nothing.

    Raises:
        LossError: if it trains with dropout and got no keys.
    """
    if not train or rate == 0:
        return None
    if keys is None:
        raise LossError(
            f"the model trains with dropout={rate} and got no keys to draw from. Pass "
            f"`jt.row_keys(rng, batch)` after its inputs, or train=False where nothing is dropped."
        )
    return keys
