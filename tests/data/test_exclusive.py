"""A batch on its way to the devices has memory that no reader can write."""

import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled
from jtrain.data.batches.exclusive import ALIGNMENT, aligned_copy, read_exclusive
from jtrain.data.batches.skip import SkipBatches
from jtrain.data.batches.stacked import StackedBatches
from jtrain.data.batches.workers import Workers

BUFFER = np.zeros((3, 8), np.float32)
HELD = {"x": np.zeros(8, np.float32)}


def generate():
    while True:
        batch = {"x": np.zeros(8, np.float32)}
        yield batch  # the frame of the generator still has the batch


GENERATED = generate()


def a_view_of_a_view(step):
    view = BUFFER[step:]
    return {"x": view[:1]}


def a_buffer_of_python(step):
    return {"x": np.frombuffer(bytearray(64), np.float32)}


def read_only_view(step):
    view = BUFFER[step]
    view.setflags(write=False)
    return {"x": view}


@pytest.mark.parametrize(
    "read",
    [
        lambda step: {"x": BUFFER},
        lambda step: {"x": BUFFER[step]},
        lambda step: {"x": BUFFER.reshape(-1)},
        lambda step: HELD,
        lambda step: next(GENERATED),
        a_view_of_a_view,
        a_buffer_of_python,
        read_only_view,
    ],
)
def test_what_a_reader_could_write_again_is_copied(read):
    array = read(0)["x"]
    found = read_exclusive(read, 0)["x"]
    assert not np.shares_memory(found, array)
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("make", [np.empty, lambda n: np.empty(n)[2:], lambda n: [np.empty(n)][0]])
def test_a_new_array_is_not_copied(make):
    addresses = []

    def read(step):
        array = make(8)
        addresses.append(array.ctypes.data)
        return {"x": array}

    assert read_exclusive(read, 0)["x"].ctypes.data == addresses[0]


def test_an_array_under_two_names_is_copied():
    def read(step):
        array = np.zeros(8)
        return {"x": array, "y": array}

    found = read_exclusive(read, 0)
    assert not np.shares_memory(found["x"], found["y"])


def test_read_only_arrays_stay_the_same_objects():
    batches = Shuffled(Arrays(x=np.zeros((40, 2), np.float32)), size=5)
    for calls in (StackedBatches(batches), StackedBatches(SkipBatches(batches), 4)):
        first, later = (read_exclusive(calls.__getitem__, step) for step in (0, 3))
        assert first["row"] is later["row"]
        assert first["mask"] is later["mask"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_readers_of_the_library_cost_no_copy(steps, workers, monkeypatch):
    def fail(array):
        raise AssertionError("it was copied")

    monkeypatch.setattr("jtrain.data.batches.exclusive.aligned_copy", fail)
    batches = SkipBatches(Shuffled(Arrays(x=np.zeros((40, 2), np.float32)), size=5))
    calls = StackedBatches(batches, steps)
    reader = Workers(count=workers).build(calls.__getitem__, start=0, stop=3)
    for step in range(3):
        read_exclusive(reader, step)
    reader.close()


@pytest.mark.parametrize("array", [np.zeros(()), np.zeros((0, 3)), np.arange(12).reshape(3, 4).T])
def test_a_copy_has_the_values_of_any_shape(array):
    copy = aligned_copy(array)
    np.testing.assert_array_equal(copy, array)
    assert (copy.shape, copy.dtype) == (array.shape, array.dtype)
    assert copy.flags.writeable
