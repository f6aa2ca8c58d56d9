"""A line to fit: the smallest problem that has a gradient, and quick to compile."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.mean import Mean
from jtrain.core.state import TrainState, new_state
from jtrain.parallel import Strategy


def line():
    return {"slope": jnp.array([0.5, -1.0, 2.0]), "offset": jnp.float32(0.25)}


def height(params, batch):
    return batch["x"] @ params["slope"] + params["offset"]  # b


def squared(params, batch, rng):
    del rng
    return Mean.of(jnp.square(height(params, batch) - batch["y"]), batch["mask"])


def points(size: int = 8, *, hidden: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Points about a line; the mask hides the last `hidden` rows."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(size, 3)).astype(np.float32)
    return {
        "x": x,
        "y": (x @ np.float32([1, 2, 3]) + random.normal(size=size)).astype(np.float32),
        "row": np.arange(size, dtype=np.int32),
        "mask": np.arange(size) < size - hidden,
    }


def start(
    optimizer: optax.GradientTransformation, where: Strategy | None = None, extra=()
) -> TrainState:
    """A state before the first step, of arrays that nobody else holds."""
    make = lambda: new_state(line(), optimizer, jax.random.key(3), extra)
    if where is None:
        return jax.jit(make)()
    return jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
