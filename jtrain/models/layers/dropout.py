"""Dropout that depends on a row's own key, and sequences of keys."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.rows import threefry
from jtrain.core.types import Key
from jtrain.errors import LossError


def drop(
    x: Float[Array, "b *s"],
    rate: float,
    keys: Shaped[Array, "b"] | None,
    *,
    site: int | Int[Array, ""] = 0,
    order: np.ndarray | None = None,
) -> Float[Array, "b *s"]:
    """Zero each number with probability `rate` and scale the others by 1 / (1 - rate).

    A row draws from its own key (`jtrain.row_keys`), so that its mask depends on no device,
    microbatch or other row. Without keys, or at a rate of 0, `x` is returned.

    Args:
        site: a number for each call of `drop` in a model.
        order: the position of each token of `x`, where they are permuted; the mask follows the
            position.
    """
    if keys is None or rate == 0:
        return x

    def draw_mask(key):
        mask = jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:])
        return mask if order is None else mask[order]

    return jnp.where(jax.vmap(draw_mask)(keys), x / (1 - rate), jnp.zeros((), x.dtype))


def drawn_from(
    keys: Shaped[Array, "b"] | None, rate: float, *, train: bool
) -> Shaped[Array, "b"] | None:
    """Return the keys for dropout, or None where nothing is dropped.

    Raises:
        LossError: if the model trains with dropout and `keys` is None.
    """
    if not train or rate == 0:
        return None
    if keys is None:
        raise LossError(
            f"the model trains with dropout={rate} and got no keys to draw from. Pass "
            f"`rng=jt.row_keys(rng, batch)` to apply, or train=False to drop nothing."
        )
    return keys


class KeySequence:
    """The keys of `nnx.Rngs(key).params()`, from number `start` on.

    Unlike in a stream of flax, `start` may be a traced number: so stacked layers draw under
    `jax.vmap` the same values as layers made one after the other.
    """

    def __init__(self, key: Key, start: int | Int[Array, ""] = 0):
        self._key, self.start = threefry(key), start
        self.count = 0

    def params(self) -> Key:
        """Return the next key."""
        self.count += 1
        return jax.random.fold_in(self._key, self.start + self.count - 1)

    def fork(self, start: int | Int[Array, ""] | None = None) -> "KeySequence":
        """Return the same sequence from number `start` on; by default from the next key."""
        return KeySequence(self._key, self.start + self.count if start is None else start)
