"""Batches on devices, the devices themselves, and dims by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from layouts import strategy
from line import points

from jtrain.errors import DataError
from jtrain.parallel.strategies.strategy import PlacedBatchCache


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
