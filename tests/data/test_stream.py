"""Streams: batches by the step, resumed, in any thread, interleaved, shared by processes."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import LoaderBatches, MixedBatches, ReadAhead
from jtrain.data.batches.stream import ShardedStream, Stream, Streamed
from jtrain.data.sources.arrays import Arrays
from jtrain.data.text.corpora import TextLines
from jtrain.data.text.lines import Lines, make_line_rows
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.errors import DataError

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
    assert jumping[2]["tokens"].tolist() == expected[2], "changing a batch changes no stream"


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


COUNTS = (3, 8, 5, 1)  # lines of each file: ragged


@pytest.fixture
def counted(tmp_path: Path) -> list[Path]:
    """Write files whose lines are distinct numbers."""
    found, first = [], 0
    for number, count in enumerate(COUNTS):
        found.append(tmp_path / f"{number}.txt")
        found[-1].write_text("".join(f"{first + i}\n" for i in range(count)))
        first += count
    return found


def shared(counted: list[Path], policy: str, size: int = 4) -> ShardedStream:
    row = lambda line: {"x": np.int32(line)}
    lines = lambda some: Lines(list(some), buffer=1)
    return ShardedStream(counted, lines, row, size=size, policy=policy)


def read_all(stream: ShardedStream, count: int, steps: int) -> np.ndarray:
    """Return the rows of all processes: steps, batch."""
    parts = [stream.shard(index, count) for index in range(count)]
    rows = [np.concatenate([part[step]["x"] for part in parts]) for step in range(steps)]
    places = np.concatenate([part[0]["row"] for part in parts])
    assert places.tolist() == list(range(stream.size))
    assert all(part[0]["mask"].all() for part in parts)
    return np.stack(rows)


def test_data_has_the_order_of_one_process(counted: list[Path]):
    stream = shared(counted, "data")
    single = read_all(stream, 1, 9)
    assert single.ravel()[:17].tolist() == list(range(17)), "and no line is skipped"
    for count in (2, 4):
        np.testing.assert_array_equal(read_all(stream, count, 9), single)


def test_each_process_reads_its_own_files_completely(counted: list[Path]):
    count = 2
    for index in range(count):
        part = shared(counted, "file").shard(index, count)
        own = sum(COUNTS[index::count])
        each = 4 // count
        read = np.concatenate([part[step]["x"] for step in range(3 * own)])
        counts = Counter(read.tolist())
        assert len(counts) == own
        assert set(counts.values()) == {3 * each}, "complete epochs, and no end to wait at"


@pytest.mark.parametrize("policy", ["file", "data"])
def test_resumes_from_the_merged_state_of_all_processes(counted: list[Path], policy: str):
    parts = [shared(counted, policy).shard(index, 2) for index in range(2)]
    expected = [[part[step]["x"].tolist() for step in range(12)] for part in parts]
    kept = [json.loads(json.dumps(part.state(7))) for part in parts]
    state = kept[0]
    if "shares" in state:
        state = {"shares": kept[0]["shares"] | kept[1]["shares"]}
    for index in range(2):
        again = shared(counted, policy).shard(index, 2)
        again.restore(state)
        assert [again[step]["x"].tolist() for step in range(7, 12)] == expected[index][7:]


def test_the_state_of_two_processes_is_refused_by_four(counted: list[Path]):
    parts = [shared(counted, "file").shard(index, 2) for index in range(2)]
    state = {"shares": parts[0].state(0)["shares"] | parts[1].state(0)["shares"]}
    with pytest.raises(DataError, match=r"2 streams, .*4 ones.*Resume with 2 proc"):
        shared(counted, "file").shard(0, 4).restore(state)
    with pytest.raises(DataError, match=r"in shared streams, .*2 ones.*sharing=data"):
        shared(counted, "file").shard(0, 2).restore(shared(counted, "data").state(0))


@pytest.mark.parametrize("other", [{"x": np.zeros((2, 3))}, {"x": np.zeros(2), "y": np.zeros(2)}])
def test_sources_of_one_batch_need_the_same_arrays(other):
    with pytest.raises(DataError, match=r"where it was x float64\[\] before"):
        MixedBatches({"a": (Arrays(x=np.zeros(2)), 1), "b": (Arrays(**other), 1)}, size=2)


def test_lines_are_rows_of_tokens(tmp_path: Path):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "ab"}\n{"text": "abcdefgh"}\n')
    (tmp_path / "judge.txt").write_text("xy\n\nlonger than that\nz\n")
    asked = TextLines(
        path=f"{tmp_path}/*.jsonl", validation=f"{tmp_path}/judge.txt", context=4, buffer=1
    )
    corpus = asked.build()
    train, valid = corpus.shuffled(size=2, seed=0), corpus.in_order(size=2)
    np.testing.assert_array_equal(train[0]["tokens"], [[97, 98, 256, 0, 0], list(b"abcde")])
    np.testing.assert_array_equal(train[0]["length"], [2, 4])
    assert train.shard(1, 2).summary.startswith("data: 2 files, 2 processes: this one reads 1")
    rows = [valid[i] for i in range(len(valid))]
    assert sum(int(row["mask"].sum()) for row in rows) == 3
    assert rows[0]["tokens"][1].tolist() == list(b"longe")
