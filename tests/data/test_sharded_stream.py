"""Streamed files: sharded between processes, interleaved, and as a corpus of lines."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.batches.stream import ShardedStream
from jtrain.data.sources.arrays import Interleaved
from jtrain.data.text.corpora import TextLines
from jtrain.data.text.lines import InterleavedStream, Lines
from jtrain.errors import DataError

LINES = (3, 8, 5, 1)  # lines of each file: ragged


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write files whose lines are distinct numbers."""
    found, first = [], 0
    for number, count in enumerate(LINES):
        found.append(tmp_path / f"{number}.txt")
        found[-1].write_text("".join(f"{first + i}\n" for i in range(count)))
        first += count
    return found


def batches(files: list[Path], policy: str, size: int = 4) -> ShardedStream:
    row = lambda line: {"x": np.int32(line)}
    return ShardedStream(
        files, lambda some: Lines(list(some), buffer=1), row, size=size, policy=policy
    )


def read_all(stream: ShardedStream, count: int, steps: int) -> np.ndarray:
    """Return the rows of all processes: steps, batch."""
    parts = [stream.shard(index, count) for index in range(count)]
    rows = [np.concatenate([part[step]["x"] for part in parts]) for step in range(steps)]
    places = np.concatenate([part[0]["row"] for part in parts])
    assert places.tolist() == list(range(stream.size))
    assert all(part[0]["mask"].all() for part in parts)
    return np.stack(rows)


def test_data_has_the_order_of_one_process(files: list[Path]):
    stream = batches(files, "data")
    single = read_all(stream, 1, 9)
    assert single.ravel()[:17].tolist() == list(range(17)), "and no line is skipped"
    for count in (2, 4):
        np.testing.assert_array_equal(read_all(stream, count, 9), single)


def test_each_process_reads_its_own_files_completely(files: list[Path]):
    count = 2
    for index in range(count):
        part = batches(files, "file").shard(index, count)
        own = sum(LINES[index::count])
        each = 4 // count
        read = np.concatenate([part[step]["x"] for step in range(3 * own)])
        counts = Counter(read.tolist())
        assert len(counts) == own
        assert set(counts.values()) == {3 * each}, "complete epochs, and no end to wait at"


@pytest.mark.parametrize("policy", ["file", "data"])
def test_resumes_from_the_merged_state_of_all_processes(files: list[Path], policy: str):
    parts = [batches(files, policy).shard(index, 2) for index in range(2)]
    expected = [[part[step]["x"].tolist() for step in range(12)] for part in parts]
    kept = [json.loads(json.dumps(part.state(7))) for part in parts]
    state = kept[0]
    if "shares" in state:
        state = {"shares": kept[0]["shares"] | kept[1]["shares"]}
    for index in range(2):
        again = batches(files, policy).shard(index, 2)
        again.restore(state)
        assert [again[step]["x"].tolist() for step in range(7, 12)] == expected[index][7:]


def test_the_state_of_two_processes_is_refused_by_four(files: list[Path]):
    parts = [batches(files, "file").shard(index, 2) for index in range(2)]
    state = {"shares": parts[0].state(0)["shares"] | parts[1].state(0)["shares"]}
    with pytest.raises(DataError, match=r"2 streams, one a process.*4 streams.*Resume with 2 proc"):
        batches(files, "file").shard(0, 4).restore(state)
    with pytest.raises(DataError, match=r"one stream for all.*2 streams.*sharing=data"):
        batches(files, "file").shard(0, 2).restore(batches(files, "data").state(0))


class Numbered:
    """Rows that depend on their index; possibly none."""

    def __init__(self, first: int, rows: int):
        self.first, self.rows = first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        assert not len(indices) or indices.max() < self.rows
        return {"x": self.first + indices}


def numbered(*lengths: int) -> list[Numbered]:
    return [Numbered(100 * i, length) for i, length in enumerate(lengths)]


def by_hand(*lengths: int) -> list[int]:
    """Return the rows in turn, one by one."""
    left, out = [list(100 * i + np.arange(n)) for i, n in enumerate(lengths)], []
    while any(left):
        out += [rows.pop(0) for rows in left if rows]
    return out


@pytest.mark.parametrize("lengths", [(4, 0, 2), (2, 7, 7, 1, 2)])
def test_rows_come_in_turn(lengths: tuple[int, ...]):
    source, expected = Interleaved(numbered(*lengths)), by_hand(*lengths)
    assert len(source) == len(expected)
    assert source[np.arange(len(source))]["x"].tolist() == expected
    mixed = np.random.default_rng(0).permutation(len(source))
    assert source[mixed]["x"].tolist() == [expected[i] for i in mixed]


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    for number, lines in enumerate([5, 3, 4, 2]):
        text = "".join(f"{number} {line}\n" for line in range(lines))
        (tmp_path / f"{number}.txt").write_text(text)
    return sorted(tmp_path.glob("*.txt"))


def test_streams_take_turns_and_resume_from_a_saved_state(texts: list[Path]):
    open_stream = lambda: InterleavedStream([Lines(path, buffer=1) for path in texts[:3]])
    stream = open_stream()
    began = [stream.next() for _ in range(7)]
    assert began == ["0 0", "1 0", "2 0", "0 1", "1 1", "2 1", "0 2"]
    state = json.loads(json.dumps(stream.state()))
    after = [stream.next() for _ in range(20)]
    again = open_stream()
    again.restore(state)
    assert [again.next() for _ in range(20)] == after
    with pytest.raises(DataError, match=r"2 streams are read in turn .* data\.interleave=3"):
        InterleavedStream([Lines(path) for path in texts[:2]]).restore(state)


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
