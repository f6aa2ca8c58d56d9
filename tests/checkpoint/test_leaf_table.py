"""Differences between two states are listed leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import leaf_table
from jtrain.core import pytree
from jtrain.errors import CheckpointError


def test_a_table_of_differing_leaves():
    stored = {
        "params": {
            "mlp": {"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)},
            "w": jnp.zeros(3),
        },
        "rng": jax.random.key(0),
        "step": jnp.int32(0),
    }
    here = {
        "params": {
            "mlp": {"kernal": jnp.zeros((16, 64)), "bias": jnp.zeros(64)},
            "w": jnp.zeros(3),
        },
        "rng": jax.random.key(0, impl="rbg"),
        "step": jnp.float32(0),
    }
    with pytest.raises(CheckpointError) as refusal:
        leaf_table.check_same(pytree.describe(stored), here, "checkpoint 5")
    assert str(refusal.value).splitlines() == [
        "checkpoint 5 holds another state: 5 leaves differ, of 5 expected and 5 stored.",
        "  leaf               expected         found            nearest",
        "  params/mlp/bias    float32[64]      float32[32]",
        "  params/mlp/kernal  float32[16, 64]  -                params/mlp/kernel",
        "  params/mlp/kernel  -                float32[16, 32]  params/mlp/kernal",
        "  rng                key<rbg>[]       key<fry>[]",
        "  step               float32[]        int32[]",
        "Build the state from the config in the checkpoint, or start a new run with this "
        "config (name=...).",
    ]


def test_a_long_table_is_cut():
    stored = {f"w{i}": np.zeros(i + 1, np.float32) for i in range(100)}
    with pytest.raises(CheckpointError) as refusal:
        leaf_table.check_same(pytree.describe(stored), {"w0": jnp.zeros(1)}, "checkpoint 5")
    assert "99 leaves differ" in str(refusal.value)
    assert "  and 79 more\n" in str(refusal.value)
    assert len(str(refusal.value)) < 2000


def test_the_same_states_pass():
    state = {"a": jnp.zeros(3), "key": jax.random.key(0)}
    leaf_table.check_same(pytree.describe(state), jax.eval_shape(lambda: state), "checkpoint 5")


def test_unflatten_inverts_flatten():
    state = {
        "a": [jnp.zeros(3), {"b": jnp.ones(())}],
        "key": jax.random.split(jax.random.key(0), 2),
    }
    flat = leaf_table.flatten(state)
    assert {n: (x.dtype.name, x.shape) for n, x in flat.items()} == {
        "a/0": ("float32", (3,)),
        "a/1/b": ("float32", ()),
        "key": ("uint32", (2, 2)),
    }
    back = leaf_table.unflatten(jax.eval_shape(lambda: state), flat)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(state["key"])).all()
