"""Fully sharded: what is split, how, and what that saves on each device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny_language import batches, init_params, loss_of

from jtrain.core.pytree import named_leaves
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.parallel import FSDP
from jtrain.parallel.leaf_sharding import StateSharding

ADAMW = optax.adamw(1e-2)


def made(min_size: int):
    where = FSDP(devices=8, min_size=min_size).build()
    make = lambda: new_state(init_params(jax.random.key(0)), ADAMW, jax.random.key(1))
    state = jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
    return where, state


def held(tree) -> dict[str, int]:
    """Count the numbers of each leaf on the first device."""
    return {n: leaf.addressable_shards[0].data.size for n, leaf in named_leaves(tree).items()}


@pytest.mark.thorough
def test_a_device_holds_an_eighth_of_parameters_and_of_adams_moments():
    where, state = made(min_size=64)
    batch = where.place(next(batches("full", 1)))
    step = where.compile(make_step(loss_of("full", False), ADAMW), state, batch, keeps=True)
    for _ in range(2):
        state, _ = step(state, batch)
    sizes = {name: leaf.size for name, leaf in named_leaves(state.params).items()}
    want = {name: size // 8 if size >= 64 else size for name, size in sizes.items()}
    assert want["up/bias"] == 32, "the bias is small and stays whole"
    assert want["embed"] == 32 * 16 // 8
    moments = state.opt_state[0]
    assert held(state.params) == held(moments.mu) == held(moments.nu) == want
    assert all(leaf.is_fully_replicated for leaf in (state.step, state.seed, moments.count))


def test_small_leaves_stay_whole():
    where, state = made(min_size=4096)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert where.shares == 8


@pytest.mark.thorough
def test_the_key_stays_whole_at_any_size():
    where = FSDP(devices=2, min_size=0).build()
    make = lambda: new_state(init_params(jax.random.key(0)), ADAMW, jax.random.key(1))
    state = jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
    assert jax.random.key_data(state.step_key()).tolist() == (
        jax.random.key_data(jax.random.fold_in(jax.random.key(1), 0)).tolist()
    )
    assert not state.params["up"]["bias"].is_fully_replicated


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 32), (None, "fsdp")),  # the largest
        ((16, 30), ("fsdp",)),  # the largest that divides
        ((16, 16), ("fsdp",)),  # the first of equals
        ((3, 5), ()),
        ((), ()),
    ],
)
def test_splits_the_largest_dim_that_divides(shape, spec):
    assert StateSharding({"fsdp": 8}).choose("w", shape, {}).spec == PartitionSpec(*spec)


@pytest.mark.thorough
def test_never_sums_whole_gradients_on_a_device_for_nothing():
    """Check that the compiled step gathers parameters and shards the optimizer's work."""
    where, state = made(min_size=64)
    batch = where.place(next(batches("full", 1)))
    step = jax.jit(
        make_step(loss_of("full", False), ADAMW),
        in_shardings=(where.shardings(state), batch["row"].sharding),
        out_shardings=(where.shardings(state), None),
    )
    text = step.lower(state, batch).compile().as_text()
    assert "all-gather" in text
    # The moments are never whole: no gather gives Adam's update of a whole matrix.
    memory = step.lower(state, batch).compile().memory_analysis()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert memory.argument_size_in_bytes < whole / 2
    assert jnp.isfinite(step(state, batch)[1]["loss"].total)
