import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled
from jtrain.data.batches.skip import SkipBatches
from jtrain.data.batches.stacked import StackedBatches


class Plain:
    """Batches without `read_stacked`."""

    def __init__(self, batches):
        self._batches = batches

    def __getitem__(self, step):
        return self._batches[step]


@pytest.mark.parametrize("end", ["cross", "drop", "pad"])
@pytest.mark.parametrize("process", [(0, 1), (1, 2)])
def test_a_call_stacks_the_batches_of_its_steps(end, process):
    source = Arrays(x=np.arange(70, dtype=np.float32).reshape(35, 2), label=np.arange(35))
    batches = Shuffled(source, size=6, seed=3, end=end).shard(*process)
    calls, slow = StackedBatches(batches, 4), StackedBatches(Plain(batches), 4)
    for call in range(5):
        for name, array in calls[call].items():
            wanted = np.stack([batches[4 * call + i][name] for i in range(4)])
            np.testing.assert_array_equal(array, wanted)
            np.testing.assert_array_equal(slow[call][name], wanted)


def test_arrays_shared_by_all_batches_stay_one_object():
    batches = Shuffled(Arrays(x=np.zeros((40, 2), np.float32)), size=5)
    for calls in (StackedBatches(batches, 3), StackedBatches(Plain(batches), 3)):
        assert calls[0]["row"] is calls[4]["row"]
        assert calls[0]["mask"] is calls[4]["mask"]
        assert calls[0]["x"] is not calls[4]["x"]


def test_one_step_a_call_is_the_batch_itself():
    batches = Shuffled(Arrays(x=np.zeros((40, 2), np.float32)), size=5)
    assert StackedBatches(batches)[2].keys() == batches[2].keys()


class OneBuffer:
    """Batches that a reader makes in one buffer, which it hands out as it is or read-only."""

    def __init__(self, *, read_only: bool):
        self._buffer, self._read_only = np.zeros((2, 3), np.float32), read_only

    def __getitem__(self, step):
        self._buffer[...] = step
        view = self._buffer.view()
        view.setflags(write=not self._read_only)
        return {"x": view}


@pytest.mark.parametrize("read_only", [False, True])
def test_batches_of_one_buffer_are_stacked_as_they_were_read(read_only):
    calls = StackedBatches(OneBuffer(read_only=read_only), 4)
    for first in (0, 4):
        assert calls[first // 4]["x"][:, 0, 0].tolist() == [first + i for i in range(4)]


class Doubled(Shuffled):
    def __getitem__(self, step, /):
        batch = super().__getitem__(step)
        return batch | {"x": 2 * batch["x"]}


@pytest.mark.parametrize("wrap", [lambda batches: batches, SkipBatches])
def test_a_subclass_that_changes_each_batch_changes_those_of_a_call(wrap):
    source = Arrays(x=np.arange(40, dtype=np.float32))
    calls = StackedBatches(wrap(Doubled(source, size=5, seed=1)), 4)
    plain = Shuffled(source, size=5, seed=1)
    for i in range(4):
        np.testing.assert_array_equal(calls[0]["x"][i], 2 * plain[i]["x"])
