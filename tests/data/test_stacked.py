"""Batches stacked to calls, without those that are skipped, in memory of their own."""

import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled, Streamed
from jtrain.data.batches.step_batches import (
    SkipBatches,
    StackedBatches,
    copy_writable,
    find_batch,
    merge_windows,
)


class Plain:
    """Batches without `read_stacked`."""

    def __init__(self, batches):
        self._batches = batches

    def __getitem__(self, step):
        return self._batches[step]


@pytest.mark.parametrize("end", ["cross", "drop", "pad"])
def test_a_call_stacks_the_batches_of_its_steps(end):
    source = Arrays(x=np.arange(70, dtype=np.float32).reshape(35, 2), label=np.arange(35))
    batches = Shuffled(source, size=6, seed=3, end=end).shard(1, 2)
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


def test_only_skipped_batches_are_missing():
    draw = np.random.default_rng(0)
    for _ in range(20):
        pairs = np.sort(draw.integers(0, 60, (draw.integers(1, 6), 2)), axis=1).tolist()
        skipped = {n for first, stop in pairs for n in range(first, stop)}
        wanted = [n for n in range(100) if n not in skipped]
        windows = merge_windows([(first, stop) for first, stop in pairs])
        assert [find_batch(step, windows) for step in range(len(wanted))] == wanted


class Counting:
    """A stream of 0, 1, 2 ... and its position."""

    def __init__(self):
        self.at = 0

    def next(self):
        self.at += 1
        return self.at - 1

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


def streamed() -> Streamed:
    return Streamed(Counting, lambda x: {"x": np.int64(x)}, size=2, every=3)


def shuffled() -> Shuffled:
    return Shuffled(Arrays(x=np.arange(35)), size=4, seed=3)


@pytest.mark.parametrize("make", [streamed, shuffled])
def test_calls_read_the_batches_that_are_not_skipped(make):
    kept = [n for n in range(30) if n not in (2, 3, 7)]
    calls, plain = StackedBatches(SkipBatches(make(), [(2, 4), (7, 8)]), 3), make()
    for call in range(5):
        wanted = np.stack([plain[number]["x"] for number in kept[3 * call : 3 * call + 3]])
        np.testing.assert_array_equal(calls[call]["x"], wanted)


def test_a_stream_resumes_with_windows_that_were_added_later():
    first = SkipBatches(streamed(), [(2, 4)])
    for step in range(5):
        first[step]  # batches 0 1 4 5 6
    kept = first.state(5)
    again = SkipBatches(streamed(), [(2, 4), (8, 10)])
    again.restore(kept)
    plain = streamed()
    for step, number in ((5, 7), (6, 10), (7, 11)):
        np.testing.assert_array_equal(again[step]["x"], plain[number]["x"])


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


@pytest.mark.parametrize("read", [a_view_of_a_view, a_buffer_of_python, read_only_view])
def test_what_a_reader_could_write_again_is_copied(read):
    array = read(0)["x"]
    found = copy_writable({"x": array})["x"]
    assert not np.shares_memory(found, array)
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_call_keeps_its_rows_where_the_reader_fills_one_buffer_again(steps):
    class Refilled:
        def __getitem__(self, step):
            BUFFER[:] = step
            return {"x": BUFFER}

    calls = StackedBatches(Refilled(), steps)
    first, second = calls[0]["x"], calls[1]["x"]
    assert (first.min(), first.max()) == (0, steps - 1)
    assert (second.min(), second.max()) == (steps, 2 * steps - 1)
