"""Streams: batches by the step, resumed from a saved state, in any thread."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import LoaderBatches, ReadAhead
from jtrain.data.batches.stream import Stream, Streamed
from jtrain.data.text.lines import Lines, make_line_rows
from jtrain.data.text.tokenizers import ByteTokenizer

LINES = [f"line {i}" for i in range(57)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_text("\n".join([*LINES[:30], "", " "]), encoding="utf-8")
    rows = "\n".join(json.dumps({"text": line}) for line in LINES[30:])
    (tmp_path / "b.jsonl").write_text(rows, encoding="utf-8")
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def some(stream: Lines, count: int) -> list[str]:
    return [stream.next() for _ in range(count)]


def test_each_line_occurs_once_an_epoch_except_for_the_buffer(files: list[Path]):
    found = some(Lines(files, buffer=10), 57 * 20)
    counts = Counter(found)
    assert set(counts) == set(LINES)
    # So far 57 x 20 lines and the 10 in the buffer were read: each line 20 or 21 times.
    assert sum(abs(counts[line] - 20) for line in LINES) <= 20
    assert found[:57] != LINES
    assert some(Lines(files, buffer=10, seed=1), 57) != found[:57]


@pytest.mark.parametrize(("buffer", "before"), [(1, 57), (10, 133), (200, 56)])
def test_a_restored_stream_resumes_exactly(files: list[Path], buffer: int, before: int):
    stream = Lines(files, buffer=buffer)
    assert isinstance(stream, Stream)
    some(stream, before)
    kept = json.loads(json.dumps(stream.state()))
    expected = some(stream, 150)
    again = Lines(files, buffer=buffer, seed=99)
    some(again, 3)
    again.restore(kept)
    assert some(again, 150) == expected


def batches(files: list[Path]) -> Streamed:
    rows = make_line_rows(ByteTokenizer(), 6)
    return Streamed(lambda: Lines(files, buffer=10), rows, size=4, every=5)


def test_a_batch_is_a_function_of_the_step(files: list[Path]):
    whole = batches(files)
    expected = [whole[step]["tokens"].tolist() for step in range(40)]
    assert len({str(tokens) for tokens in expected}) == 40
    jumping = batches(files)
    for step in (17, 17, 3, 39, 38, 0):
        assert jumping[step]["tokens"].tolist() == expected[step]
    part = batches(files).shard(1, 2)
    assert part[7]["tokens"].tolist() == expected[7][2:]
    jumping[2]["tokens"][:] = 0
    assert jumping[2]["tokens"].tolist() == expected[2], (
        "changing a batch does not change the stream"
    )


def test_a_run_resumes_from_the_state_of_a_step(files: list[Path]):
    first = batches(files).shard(0, 1)
    expected = [first[step]["tokens"].tolist() for step in range(40)]
    kept = json.loads(json.dumps(first.state(33)))
    assert kept["step"] == 30, "at any read position"
    read: list[int] = []

    class Counting(Lines):
        def next(self) -> str:
            read.append(1)
            return super().next()

    rows = make_line_rows(ByteTokenizer(), 6)
    again = Streamed(lambda: Counting(files, buffer=10), rows, size=4, every=5).shard(0, 1)
    assert again[0]["tokens"].tolist() == expected[0], "like a run, for the shapes"
    again.restore(kept)
    read.clear()
    assert [again[step]["tokens"].tolist() for step in (33, 34, 35)] == expected[33:36]
    assert len(read) == 6 * 4, "from step 30 on, not from the beginning"
    assert again[3]["tokens"].tolist() == expected[3]


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
