"""Lines of several files among several processes: by policy, none lost, none waited for."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.batches.sharded_stream import ShardedStream
from jtrain.data.sources.lines import Lines
from jtrain.errors import ConfigError, DataError

LINES = (3, 8, 5, 1)  # of each file: ragged


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files whose lines are numbers, each its own."""
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


def seen(shared: ShardedStream, count: int, steps: int) -> np.ndarray:
    """What the processes read together: steps, batch."""
    parts = [shared.shard(index, count) for index in range(count)]
    rows = [np.concatenate([part[step]["x"] for part in parts]) for step in range(steps)]
    places = np.concatenate([part[0]["row"] for part in parts])
    assert places.tolist() == list(range(shared.size))
    assert all(part[0]["mask"].all() for part in parts)
    return np.stack(rows)


def test_data_has_the_order_of_one_process(files: list[Path]):
    shared = batches(files, "data")
    alone = seen(shared, 1, 9)
    assert alone.ravel()[:17].tolist() == list(range(17)), "and none is left out"
    for count in (2, 4):
        np.testing.assert_array_equal(seen(shared, count, 9), alone)


@pytest.mark.parametrize("count", [2, 4])
def test_files_of_its_own_are_read_whole_whatever_the_others_have(files: list[Path], count: int):
    for index in range(count):
        part = batches(files, "file").shard(index, count)
        mine = sum(LINES[index::count])
        each = 4 // count
        read = np.concatenate([part[step]["x"] for step in range(3 * mine)])
        counts = Counter(read.tolist())
        assert len(counts) == mine
        assert set(counts.values()) == {3 * each}, "whole epochs, and no end to wait at"


def test_off_gives_all_lines_to_each(files: list[Path]):
    parts = [batches(files, "off").shard(index, 2) for index in range(2)]
    read = [np.concatenate([part[step]["x"] for step in range(9)]) for part in parts]
    np.testing.assert_array_equal(*read)
    assert set(read[0].tolist()) == set(range(sum(LINES)))


def test_auto_takes_files_where_each_gets_as_many_and_says_so(files: list[Path]):
    assert "took file), the order" in batches(files, "auto").shard(0, 2).summary
    assert "took data)" in batches(files[:3], "auto").shard(0, 2).summary
    assert "3 files, 2 processes" in batches(files[:3], "auto").shard(0, 2).summary


@pytest.mark.parametrize("policy", ["file", "data", "off"])
def test_goes_on_from_what_all_processes_kept(files: list[Path], policy: str):
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


def test_places_of_two_processes_are_none_of_four(files: list[Path]):
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
