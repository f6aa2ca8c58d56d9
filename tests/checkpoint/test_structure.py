"""A state of another structure is refused with all differences, and cast only on request."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import like, same_bits

from jtrain.checkpoint import CheckpointManager, leaf_table
from jtrain.core import pytree
from jtrain.errors import CheckpointError

LEAVES = {
    "params": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6, jnp.bfloat16)},
    "opt_state": ({"mu": jnp.ones((4, 6))}, jnp.int32(3)),
    "rng": jax.random.key(0),
    "step": jnp.int32(7),
}
NAMES = list(pytree.named_leaves(LEAVES))


def without(name: str) -> dict[str, jax.Array]:
    return {other: leaf for other, leaf in pytree.named_leaves(LEAVES).items() if other != name}


def another(how: str, name: str) -> tuple[dict, str]:
    """Return a state that differs in one leaf in one way, and the expected row."""
    leaf = pytree.named_leaves(LEAVES)[name]
    was = pytree.describe(LEAVES)[name]
    if how == "missing":
        return without(name), f"{name}  -  {was}"
    if how == "extra":
        there = {**pytree.named_leaves(LEAVES), f"{name}_too": jnp.zeros(3)}
        return there, f"{name}_too  float32[3]  -"
    if how == "renamed":
        return {**without(name), f"{name}x": leaf}, f"{name}x  {was}  -  {name}"
    if how == "shape":
        new = jnp.zeros((*leaf.shape, 2), jnp.float32)
        told = f"float32{list(new.shape)}"
        return {**without(name), name: new}, f"{name}  {told}  {was}"
    other = jnp.float16 if was.startswith("int32") else jnp.int8
    new = jnp.zeros(leaf.shape, other)
    return {**without(name), name: new}, f"{name}  {new.dtype}{list(new.shape)}  {was}"


HOWS = ("missing", "extra", "renamed", "shape", "dtype")
CASES = [(how, name) for how in HOWS for name in NAMES]


@pytest.mark.thorough
@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
def test_every_difference_of_one_leaf_is_a_row_with_its_nearest_name(cast: bool):
    found = pytree.describe(LEAVES)
    refused = 0
    for how, name in CASES:
        state, row = another(how, name)
        if cast and how == "dtype" and name != "rng":
            asked = leaf_table.check_same(found, state, "checkpoint 5", cast=True)
            assert str(asked[name].dtype) == str(pytree.named_leaves(LEAVES)[name].dtype)
            continue
        with pytest.raises(CheckpointError) as refusal:
            leaf_table.check_same(found, state, "checkpoint 5", cast=cast)
        rows = [" ".join(line.split()) for line in str(refusal.value).splitlines()]
        assert " ".join(row.split()) in rows, f"{how} of {name}"
        refused += 1
    assert refused == len(CASES) - 5 * cast


@pytest.mark.thorough
def test_a_leaf_is_cast_only_on_request(tmp_path: Path):
    state = {"w": jnp.linspace(-3, 3, 12).reshape(3, 4), "n": jnp.int32(7)}
    asked = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=state["w"].sharding),
        "n": jax.ShapeDtypeStruct((), np.float32),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        with pytest.raises(CheckpointError, match="2 leaves differ"):
            checkpoints.restore(1, asked)
        back = checkpoints.restore(1, asked, cast=True)
        assert same_bits(back["w"], state["w"].astype(jnp.bfloat16))
        assert back["w"].sharding == state["w"].sharding
        assert (type(back["n"]), back["n"].dtype, back["n"]) == (np.ndarray, np.float32, 7)
        assert same_bits(checkpoints.restore(1, like(state), cast=True), state)
