"""Streamed files sharded between processes by policy: no line lost, no process waits."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.batches.sharded_stream import ShardedStream
from jtrain.data.sources.lines import Lines
from jtrain.errors import ConfigError, DataError

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


@pytest.mark.parametrize("count", [2, 4])
def test_each_process_reads_its_own_files_completely(files: list[Path], count: int):
    for index in range(count):
        part = batches(files, "file").shard(index, count)
        own = sum(LINES[index::count])
        each = 4 // count
        read = np.concatenate([part[step]["x"] for step in range(3 * own)])
        counts = Counter(read.tolist())
        assert len(counts) == own
        assert set(counts.values()) == {3 * each}, "complete epochs, and no end to wait at"


def test_off_gives_all_lines_to_each(files: list[Path]):
    parts = [batches(files, "off").shard(index, 2) for index in range(2)]
    read = [np.concatenate([part[step]["x"] for step in range(9)]) for part in parts]
    np.testing.assert_array_equal(*read)
    assert set(read[0].tolist()) == set(range(sum(LINES)))


def test_auto_takes_files_if_each_process_gets_the_same_number(files: list[Path]):
    assert "took file), the order" in batches(files, "auto").shard(0, 2).summary
    assert "took data)" in batches(files[:3], "auto").shard(0, 2).summary
    assert "3 files, 2 processes" in batches(files[:3], "auto").shard(0, 2).summary


@pytest.mark.parametrize("policy", ["file", "data", "off"])
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


def test_refuses_fewer_files_and_fewer_rows_than_processes(files: list[Path]):
    with pytest.raises(DataError, match=r"3 files, 4 processes: 1 would read nothing.*sharing=dat"):
        batches(files[:3], "file").shard(0, 4)
    with pytest.raises(ConfigError, match=r"batch 2 does not divide into 4 proc.*batch=4"):
        batches(files, "data", size=2).shard(0, 4)
