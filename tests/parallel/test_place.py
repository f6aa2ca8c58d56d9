"""Batches on devices, what is split of a state and how, and axes that no dim can use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from layouts import strategy
from line import points
from quick_study import config_of, write_study
from tiny_language import batches, init_params, loss_of

from jtrain.core.pytree import named_leaves
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import DataError, ShardingError
from jtrain.parallel import FSDP, Axes
from jtrain.parallel.leaf_sharding import StateSharding
from jtrain.parallel.strategies.strategy import PlacedBatchCache
from jtrain.train.program import set_up


def test_a_device_gets_its_rows_and_no_others():
    placed = strategy("mirrored jit", 4).place(points(8))
    for number, shard in enumerate(placed["row"].addressable_shards):
        assert shard.data.tolist() == [2 * number, 2 * number + 1]
    for name, array in points(8).items():
        np.testing.assert_array_equal(placed[name], array)


def test_stacked_steps_are_split_by_rows():
    stacked = {name: np.stack([x, x, x]) for name, x in points(8).items()}
    placed = strategy("fsdp", 4).place(stacked, stacked=True)
    assert placed["row"].sharding.spec == PartitionSpec(None, "fsdp")
    assert placed["x"].addressable_shards[0].data.shape == (3, 2, 3)


@pytest.mark.parametrize("name", ["single", "mirrored jit"])
def test_what_is_the_same_and_read_only_is_sent_once(name):
    where, batch = strategy(name, 1), points(8)
    batch["mask"].setflags(write=False)
    first = where.place(batch)
    batch["x"][0] = 7
    second = where.place(batch)
    assert second["mask"] is first["mask"]
    assert second["x"][0].tolist() == [7, 7, 7], "what may be written to is sent anew"
    other = where.place(batch | {"mask": ~batch["mask"]})
    assert other["mask"].tolist() == [False] * 8


def test_a_named_dim_is_split_over_its_axis():
    place = strategy("mirrored jit", 4).placement
    x = jax.jit(lambda x: place.constrain(x, "batch", "time", None))(jnp.ones((8, 3, 5)))
    assert x.addressable_shards[0].data.shape == (2, 3, 5)


@pytest.mark.parametrize("name", ["single", "mirrored pmap"])
def test_a_copy_of_the_step_constrains_nothing(name):
    x = jnp.ones((8, 3))
    assert strategy(name, 1).placement.constrain(x, "batch", None) is x


@pytest.mark.parametrize("name", ["single", "mirrored jit"])
def test_a_whole_number_that_no_device_holds_is_refused(name):
    place = strategy(name, 1).place
    most = np.array([2**31 - 1, -(2**31)])
    assert place({"id": most})["id"].tolist() == most.tolist()
    for value in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(DataError, match=f"`id` holds {value}.*int32.*np.unique"):
            place({"id": np.array([3, value])})


def read_only(*values: int) -> np.ndarray:
    array = np.array(values)
    array.setflags(write=False)
    return array


def test_a_batch_placed_in_the_middle_of_another_gives_each_its_own_mask():
    full, ragged = read_only(1, 1), read_only(1, 0)
    inside: list[dict] = []

    def put(tree):
        if "x" in tree and not inside:  # as another thread would
            inside.append(place({"mask": ragged}))
        return {name: jnp.asarray(array) for name, array in tree.items()}

    place = PlacedBatchCache(put)
    place({"mask": full})
    outside = place({"x": np.zeros(2), "mask": full})
    assert outside["mask"].tolist() == [1, 1]
    assert inside[0]["mask"].tolist() == [1, 0]


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
    step = where.compile(make_step(loss_of("full", False), ADAMW), state, batch, returns_state=True)
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
def test_an_axis_without_a_dim_is_refused(tmp_path):
    path = write_study(tmp_path)
    made = lambda axes: set_up(config_of(path, [f"parallel={{kind: sharded, {axes}}}"]))
    said = r"parallel\.tensor=2, and no dim.*no dim is named heads or kv_heads or hidden or vocab"
    with pytest.raises(ShardingError, match=said) as error:
        made("tensor: 2").lower_step()
    assert "Take parallel.tensor=1 " in str(error.value)
    assert "parallel.fsdp=0" in str(error.value)
    made("tensor: 1, fsdp: 0").lower_step()


def test_dims_that_do_not_divide_are_named():
    strategy = Axes(tensor=2).build()
    strategy.placement.constrain(jnp.zeros((8, 5)), "batch", "hidden")
    with pytest.raises(
        ShardingError, match=r"no dim can .*: hidden 5 is not a multiple of tensor 2"
    ):
        strategy.check_axes_used({"params": {"up": jnp.zeros((4, 5))}}, {"up": (None, "hidden")})
    strategy.placement.constrain(jnp.zeros((8, 6)), "batch", "hidden")
    strategy.check_axes_used({"params": {"up": jnp.zeros((4, 5))}}, {"up": (None, "hidden")})
