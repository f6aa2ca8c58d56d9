"""Sequences of keys, one for each array that is drawn."""

import jax
from jaxtyping import Array, Int

from jtrain.core.types import Key


class KeySequence:
    """The keys of `nnx.Rngs(key).params()`, from number `start` on.

    Unlike in a stream of flax, `start` may be a traced number: so stacked layers draw under
    `jax.vmap` the same values as layers made one after the other.
    """

    def __init__(self, key: Key, start: int | Int[Array, ""] = 0):
        self._key, self.start = key, start
        self.count = 0

    def params(self) -> Key:
        """Return the next key."""
        self.count += 1
        return jax.random.fold_in(self._key, self.start + self.count - 1)

    def fork(self, start: int | Int[Array, ""] | None = None) -> "KeySequence":
        """Return the same sequence from number `start` on; by default from the next key."""
        return KeySequence(self._key, self.start + self.count if start is None else start)
