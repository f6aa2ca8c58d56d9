"""Keys in a row, one for each array that is drawn."""

import jax
from jaxtyping import Array, Int

from jtrain.core.types import Key


class KeySequence:
    """The keys that `nnx.Rngs(key).params()` gives, from any of them on.

    Unlike a stream of flax it may start at a number that is not known while tracing: so stacked
    layers draw under `jax.vmap` what layers one after the other draw.
    """

    def __init__(self, key: Key, start: int | Int[Array, ""] = 0):
        self._key, self.start = key, start
        self.count = 0

    def params(self) -> Key:
        """The next key."""
        self.count += 1
        return jax.random.fold_in(self._key, self.start + self.count - 1)

    def fork(self, start: int | Int[Array, ""] | None = None) -> "KeySequence":
        """The same keys from number `start` on; by default from the next."""
        return KeySequence(self._key, self.start + self.count if start is None else start)
