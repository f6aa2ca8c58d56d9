"""File sharding: every record once, or by every process, as configured."""

from pathlib import Path

import pytest

from jtrain.data.batches.file_sharding import shard_files
from jtrain.errors import ConfigError, DataError


def paths(count: int) -> list[Path]:
    return [Path(f"{number}.txt") for number in range(count)]


def read(files: int, count: int, policy: str) -> list[list[str]]:
    """Return the records of each process; file n has n + 1 records."""
    shares = [shard_files(paths(files), index=i, count=count, policy=policy) for i in range(count)]
    return [
        list(s.select(f"{p.stem}.{r}" for p in s.files for r in range(int(p.stem) + 1)))
        for s in shares
    ]


@pytest.mark.parametrize("policy", ["auto", "file", "data"])
@pytest.mark.parametrize(("files", "count"), [(1, 1), (4, 2), (8, 4), (5, 2), (7, 3)])
def test_every_record_is_kept_by_one_process(files: int, count: int, policy: str):
    kept = [record for share in read(files, count, policy) for record in share]
    assert sorted(kept) == sorted(f"{f}.{r}" for f in range(files) for r in range(f + 1))


def test_off_gives_every_record_to_every_process():
    shares = read(3, 2, "off")
    assert shares[0] == shares[1]
    assert len(shares[0]) == 1 + 2 + 3


@pytest.mark.parametrize(
    ("files", "count", "summary"),
    [
        (
            8,
            4,
            "8 files, 4 processes: this one reads 2 of its own (sharing=auto took file), the order "
            "of rows depends on the number of processes",
        ),
        (
            3,
            2,
            "3 files, 2 processes: each reads all of them and keeps one record in 2 "
            "(sharing=auto took data)",
        ),
        (1, 1, "1 file, 1 process: this one reads 1 of its own (sharing=auto took file)"),
    ],
)
def test_the_choice_is_reported_in_a_line(files: int, count: int, summary: str):
    assert shard_files(paths(files), index=0, count=count).summary == summary


def test_fewer_files_than_processes_are_refused_and_the_advice_works():
    with pytest.raises(DataError, match=r"2 files, 4 processes: 2 would read nothing.*=data"):
        shard_files(paths(2), index=0, count=4, policy="file")
    assert shard_files(paths(2), index=3, count=4, policy="data").every == 4
    assert shard_files(paths(4), index=3, count=4, policy="file").files == [Path("3.txt")]


def test_an_unknown_policy_or_process_is_reported():
    with pytest.raises(ConfigError, match=r"sharing 'rows' is none of auto, file, data, off"):
        shard_files(paths(1), index=0, count=1, policy="rows")
    with pytest.raises(ConfigError, match=r"index in 0 \.\. 1"):
        shard_files(paths(2), index=2, count=2)
