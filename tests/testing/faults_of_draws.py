"""Losses whose random draws come from the wrong source."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
from planted import Planted, errors, good, height

from jtrain.core.mean import Mean
from jtrain.core.rows import first_key, row_keys


def scaled(draw):
    """Return the loss with inputs times `draw(rng, batch)`, in training only."""

    def loss(params, batch, rng):
        if rng is None:
            return good(params, batch, rng)
        times = jnp.broadcast_to(draw(rng, batch), batch["x"].shape)
        return good(params, batch | {"x": batch["x"] * times}, rng)

    return loss


def uniform(key, shape):
    return jax.random.uniform(key, shape, minval=0.5, maxval=1.5)


def coin(params, batch, rng):
    """Draw from numpy during tracing, with an effect on the loss in no case."""
    return good(params, batch, rng) if np.random.rand() < 2 else good(params, batch, None)


def by_numpy_permutation(rng, batch):
    return np.random.permutation([1.0, 2.0, 3.0]).astype(np.float32)


_GENERATOR = np.random.default_rng(0)
_COUNT = [0]


def by_generator(rng, batch):
    return np.float32(_GENERATOR.uniform(0.5, 1))


def by_python(rng, batch):
    return np.float32(random.uniform(0.5, 1))


def by_the_clock(rng, batch):
    return uniform(jax.random.key(time.time_ns() % 2**31), (3,))


def by_a_counter(rng, batch):
    _COUNT[0] += 1
    return np.float32(_COUNT[0])


def by_numpy_seed(rng, batch):
    np.random.seed(0)
    return np.random.uniform(0.5, 1, 3).astype(np.float32)


def of_keys(keys, batch):
    return jax.vmap(lambda key: uniform(key, (3,)))(keys)


def mixed_up(params, batch, rng):
    """Mix each row with a randomly drawn other row."""
    if rng is None:
        return good(params, batch, rng)
    other = jax.random.permutation(rng, len(batch["row"]))
    mix = lambda x: 0.7 * x + 0.3 * x[other]
    off = jnp.square(mix(height(params, batch)) - mix(batch["y"]))
    return Mean.of(off, batch["mask"])


def drawn_negative(params, batch, rng):
    """Contrast each row with a randomly drawn other row."""
    if rng is None:
        return good(params, batch, rng)
    other = jax.random.randint(rng, batch["row"].shape, 0, len(batch["row"]))
    far = jnp.abs(height(params, batch) - height(params, batch)[other])
    return Mean.of(errors(params, batch) + jax.nn.relu(1 - far), batch["mask"])


def half_is_swapped(params, batch, rng):
    """Reverse the labels by a coin flip."""
    if rng is None:
        return good(params, batch, rng)
    swap = jax.random.bernoulli(rng, 0.6)
    y = jnp.where(swap, batch["y"][::-1], batch["y"])
    return good(params, batch | {"y": y}, rng)


def noisy_metric(params, batch, rng):
    if rng is None:
        return good(params, batch, rng), {"error": good(params, batch, rng)}
    noise = jax.random.normal(rng, batch["y"].shape)
    return good(params, batch, rng), {
        "error": Mean.of(errors(params, batch) * noise, batch["mask"])
    }


def by_first_row(rng, batch):
    return uniform(first_key(row_keys(rng, batch)), batch["x"].shape)


def one_by_first_row(rng, batch):
    return uniform(first_key(row_keys(rng, batch)), (3,))


def by_smallest_row(rng, batch):
    return uniform(jax.random.fold_in(rng, batch["row"].min()), (3,))


def by_last_row(rng, batch):
    return uniform(row_keys(rng, batch)[-1], (3,))


def by_all_rows(rng, batch):
    return uniform(jax.random.fold_in(rng, batch["row"].sum()), (3,))


def by_number_of_rows(rng, batch):
    return uniform(jax.random.fold_in(rng, len(batch["row"])), (3,))


FAULTS = {
    "numpy's draws scale": Planted(
        scaled(lambda rng, batch: np.float32(np.random.uniform(0.5, 1))),
        "draws of the host",
        "numpy",
    ),
    "numpy's noise on all numbers": Planted(
        scaled(lambda rng, batch: np.random.uniform(0.5, 1, batch["x"].shape).astype("f")),
        "draws of the host",
        "numpy",
    ),
    "numpy's coin without an effect": Planted(coin, "draws of the host", "numpy"),
    "numpy permutes features": Planted(scaled(by_numpy_permutation), "draws of the host", "numpy"),
    "numpy is seeded again": Planted(scaled(by_numpy_seed), "draws of the host", "numpy"),
    "Python's random": Planted(scaled(by_python), "draws of the host", "random"),
    "a generator with state": Planted(scaled(by_generator), "not a function"),
    "a key from the clock": Planted(scaled(by_the_clock), "not a function"),
    "a counter": Planted(scaled(by_a_counter), "not a function"),
    "noise by position": Planted(
        scaled(lambda rng, batch: uniform(rng, batch["x"].shape)), "key of the position"
    ),
    "keys split by the number of rows": Planted(
        scaled(lambda rng, batch: of_keys(jax.random.split(rng, len(batch["row"])), batch)),
        "key of the position",
    ),
    "keys folded with the position": Planted(
        scaled(
            lambda rng, batch: of_keys(
                jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(len(batch["row"]))), batch
            )
        ),
        "key of the position",
    ),
    "noise by position in a metric": Planted(noisy_metric, "key of the position"),
    "mixup": Planted(mixed_up, "rows mixed by a draw", 'couples="batch"'),
    "negatives drawn in the batch": Planted(drawn_negative, "rows mixed by a draw"),
    "rows swapped by a coin": Planted(half_is_swapped, "rows mixed by a draw"),
    "keys of the neighbours": Planted(
        scaled(lambda rng, batch: of_keys(jnp.roll(row_keys(rng, batch), 1), batch)),
        "key of other rows",
    ),
    "the key of the last row": Planted(scaled(by_last_row), "key of other rows"),
    "noise by row and by the last row": Planted(
        scaled(
            lambda rng, batch: by_last_row(rng, batch)[None] * of_keys(row_keys(rng, batch), batch)
        ),
        "key of other rows",
    ),
    "a key from the sum of the rows": Planted(scaled(by_all_rows), "key of other rows"),
    "a key from the number of rows": Planted(
        scaled(by_number_of_rows), "key of the number of rows"
    ),
}
NAMED = {
    "a mask by the first row and noise by row": Planted(
        scaled(lambda rng, batch: by_first_row(rng, batch) * of_keys(row_keys(rng, batch), batch)),
        "one draw for the batch",
    ),
    "one mask by the first row": Planted(scaled(by_first_row), "one draw for the batch"),
    "one number by the first row": Planted(scaled(one_by_first_row), "one draw for the batch"),
    "one number by the smallest row": Planted(scaled(by_smallest_row), "one draw for the batch"),
}
