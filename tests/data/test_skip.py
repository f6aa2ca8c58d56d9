import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled, Streamed
from jtrain.data.batches.skip import SkipBatches, find_batch, merge_windows
from jtrain.data.batches.stacked import StackedBatches


@pytest.mark.parametrize(
    ("windows", "one"),
    [
        ([], ()),
        ([(5, 7), (1, 2)], ((1, 2), (5, 7))),
        ([(5, 7), (7, 9), (1, 2), (6, 8)], ((1, 2), (5, 9))),
        ([(3, 3), (4, 2)], ()),
    ],
)
def test_adjacent_windows_are_merged(windows, one):
    assert merge_windows(windows) == one


@pytest.mark.parametrize("seed", range(20))
def test_only_skipped_batches_are_missing(seed):
    draw = np.random.default_rng(seed)
    pairs = np.sort(draw.integers(0, 60, (draw.integers(1, 6), 2)), axis=1).tolist()
    skipped = {n for first, stop in pairs for n in range(first, stop)}
    wanted = [n for n in range(100) if n not in skipped]
    windows = merge_windows([(first, stop) for first, stop in pairs])
    assert [find_batch(step, windows) for step in range(len(wanted))] == wanted


class Count:
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
    return Streamed(Count, lambda x: {"x": np.int64(x)}, size=2, every=3)


def shuffled() -> Shuffled:
    return Shuffled(Arrays(x=np.arange(35)), size=4, seed=3)


@pytest.mark.parametrize("make", [streamed, shuffled])
@pytest.mark.parametrize("each", [1, 3])
def test_calls_read_the_batches_that_are_not_skipped(make, each):
    windows = [(2, 4), (7, 8)]
    kept = [n for n in range(30) if n not in (2, 3, 7)]
    calls, plain = StackedBatches(SkipBatches(make(), windows), each), make()
    for call in range(5):
        numbers = kept[call * each : (call + 1) * each]
        wanted = np.stack([plain[number]["x"] for number in numbers])
        np.testing.assert_array_equal(calls[call]["x"], wanted if each > 1 else wanted[0])


def test_a_stream_resumes_with_windows_that_were_added_later():
    first = StackedBatches(SkipBatches(streamed(), [(2, 4)]))
    for step in range(5):
        first[step]  # batches 0 1 4 5 6
    kept = first.state(5)
    again = StackedBatches(SkipBatches(streamed(), [(2, 4), (8, 10)]))
    again.restore(kept)
    plain = streamed()
    for step, number in ((5, 7), (6, 10), (7, 11)):
        np.testing.assert_array_equal(again[step]["x"], plain[number]["x"])


def test_batches_that_are_functions_of_the_step_have_no_state():
    assert StackedBatches(SkipBatches(shuffled(), [(2, 4)])).state(3) == {}
