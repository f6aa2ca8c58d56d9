"""Batches that follow one another, read by the loop while a thread prefetches."""

import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from jtrain.data import LoaderBatches, ReadAhead
from jtrain.data.batches.stream import Streamed

SIZE = 4


class Numbers:
    """Stream of 0, 1, 2 ..., slow enough for two threads to meet in it."""

    def __init__(self):
        self._next = 0

    def next(self) -> int:
        number = self._next
        time.sleep(2e-4)
        self._next = number + 1
        return number

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: dict[str, Any], /) -> None:
        self._next = state["next"]


def slow_loader() -> Iterator[dict[str, np.ndarray]]:
    for number in range(100):
        time.sleep(1e-3)
        yield {"x": np.arange(SIZE) + SIZE * number}


def streamed() -> Streamed:
    return Streamed(Numbers, lambda number: {"x": np.array(number)}, size=SIZE, every=5)


@pytest.mark.parametrize("make", [streamed, lambda: LoaderBatches(slow_loader, size=SIZE)])
def test_a_batch_is_the_same_beside_a_thread_that_prefetches(make: Any):
    batches, step = make(), -1
    with ReadAhead(batches.__getitem__, start=0, stop=20, slow=0) as ahead:
        for step, batch in enumerate(ahead):
            again = batches[step // 2]  # as statistics of leaves and reports of a step do
            for x, number in ((batch["x"], step), (again["x"], step // 2)):
                np.testing.assert_array_equal(x, np.arange(SIZE) + SIZE * number)
    assert step == 19


def test_a_stream_goes_to_a_worker_process_with_a_lock_of_its_own():
    batches = streamed()
    batches[3]
    sent = cloudpickle.loads(cloudpickle.dumps(batches))
    np.testing.assert_array_equal(sent[4]["x"], np.arange(SIZE) + SIZE * 4)


def test_looking_at_batches_again_reads_a_loader_twice_at_most():
    opened = []

    def loader() -> Iterator[dict[str, np.ndarray]]:
        own = len(opened)
        opened.append(0)
        for number in range(100):
            opened[own] += 1
            yield {"x": np.arange(SIZE) + SIZE * number}

    batches = LoaderBatches(loader, size=SIZE)
    for step in range(90):
        np.testing.assert_array_equal(batches[step]["x"], np.arange(SIZE) + SIZE * step)
        if step % 10 == 9:  # as statistics of leaves do
            np.testing.assert_array_equal(
                batches[step - 5]["x"], np.arange(SIZE) + SIZE * (step - 5)
            )
    assert opened == [90, 85]
