"""A batch on its way to the devices has memory that no reader can write."""

import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled
from jtrain.data.batches.aligned import ALIGNMENT, aligned_copy, copy_writable
from jtrain.data.batches.skip import SkipBatches
from jtrain.data.batches.stacked import StackedBatches

BUFFER = np.zeros((3, 8), np.float32)


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
        a_view_of_a_view,
        a_buffer_of_python,
        read_only_view,
    ],
)
def test_what_a_reader_could_write_again_is_copied(read):
    array = read(0)["x"]
    found = copy_writable({"x": array})["x"]
    assert not np.shares_memory(found, array)
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)


def test_read_only_arrays_stay_the_same_objects():
    batches = Shuffled(Arrays(x=np.zeros((40, 2), np.float32)), size=5)
    for calls in (StackedBatches(batches), StackedBatches(SkipBatches(batches), 4)):
        first, later = (calls[step] for step in (0, 3))
        assert first["row"] is later["row"]
        assert first["mask"] is later["mask"]


@pytest.mark.parametrize("array", [np.zeros(()), np.zeros((0, 3)), np.arange(12).reshape(3, 4).T])
def test_a_copy_has_the_values_of_any_shape(array):
    copy = aligned_copy(array)
    np.testing.assert_array_equal(copy, array)
    assert (copy.shape, copy.dtype) == (array.shape, array.dtype)
    assert copy.flags.writeable
    assert not copy.size or copy.ctypes.data % ALIGNMENT == 0
