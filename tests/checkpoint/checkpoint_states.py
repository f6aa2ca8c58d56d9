"""States to save: every kind of leaf and container that training has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    extra: Any
    opt_state: Any
    rng: Any


def make_state(seed: int = 0, width: int = 16) -> State:
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "blocks": [{"kernel": jax.random.normal(keys[0], (width, width)), "no": jnp.zeros((0, 3))}],
        "low": jax.random.normal(keys[1], (width,), jnp.bfloat16),
        "a.b": {"c d": jnp.float32(-0.0)},
    }
    trained = {"blocks": params["blocks"], "low": params["low"]}
    return State(
        step=jnp.int32(seed),
        params=params,
        extra=(jnp.arange(5), jnp.array([True, False]), jnp.array([jnp.nan, jnp.inf])),
        opt_state=optax.adamw(optax.linear_schedule(1.0, 0.0, 9)).init(trained),
        rng={"one": keys[2], "many": keys, "rbg": jax.random.key(seed, impl="rbg")},
    )


def like(state: Any, sharding: Any = None) -> Any:
    """Return the shapes, dtypes and shardings of a state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
    )


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two trees have the same structure, types and bytes."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _bytes(leaf: Any) -> bytes:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
