"""Row caches: the rows of the source, whatever happened to the cache before."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.batches.row_cache import DiskCache, cache_rows


class Counted:
    """Rows that depend on their index, and the number of reads of each."""

    def __init__(self, rows: int = 20, salt: int = 0):
        self.rows, self.salt, self.read = rows, salt, list[int]()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read += indices.tolist()
        x = np.arange(6).reshape(2, 3) * 1.5 + indices[:, None, None]
        return {"x": x.astype(np.float32) + self.salt, "y": (indices % 7).astype(np.uint8)}

    def fingerprint(self) -> str:
        return f"counted {self.rows} {self.salt}"


EVERY = np.array([3, 0, 19, 7, 3, 12])


def assert_rows(got: dict[str, np.ndarray], indices: np.ndarray, salt: int = 0) -> None:
    for name, expected in Counted(salt=salt)[indices].items():
        np.testing.assert_array_equal(got[name], expected, strict=True)


@pytest.fixture(params=["memory", "disk"])
def where(request, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else str(tmp_path / "cache")


def test_a_row_is_read_once(where: str):
    source = Counted()
    rows = cache_rows(source, where)
    source.read.clear()
    for _ in range(3):
        assert_rows(rows[EVERY], EVERY)
    assert sorted(source.read) == [0, 3, 3, 7, 12, 19]  # twice in one batch is read twice
    assert fingerprint(rows) == fingerprint(source), "a run may resume with or without a cache"
    assert len(rows) == 20


def test_later_runs_use_a_cache_on_disk(tmp_path: Path):
    DiskCache(Counted(), tmp_path)[np.arange(20)]
    source = Counted()
    rows = DiskCache(source, tmp_path)
    source.read.clear()
    assert_rows(rows[EVERY], EVERY)
    assert source.read == []


def test_a_changed_source_is_read_again(tmp_path: Path):
    DiskCache(Counted(), tmp_path)[np.arange(20)]
    assert_rows(DiskCache(Counted(salt=5), tmp_path)[EVERY], EVERY, salt=5)
    assert_rows(DiskCache(Counted(), tmp_path)[EVERY], EVERY)


@pytest.mark.parametrize("name", ["x", "digests"])
def test_a_half_written_row_is_read_again(tmp_path: Path, name: str):
    rows = DiskCache(Counted(), tmp_path)
    rows[np.arange(20)]
    path = rows.path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    source = Counted()
    again = DiskCache(source, tmp_path)
    source.read.clear()
    assert_rows(again[np.arange(20)], np.arange(20))
    assert source.read == [10]
    assert_rows(again[np.arange(20)], np.arange(20))
    assert source.read == [10], "the row is valid now"


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {data!r}]
import numpy as np
from test_row_cache import Counted
from jtrain.data.batches.row_cache import DiskCache

rows = DiskCache(Counted(200_000), {cache!r})
print("made", flush=True)
for first in range(0, 200_000, 50):
    rows[np.arange(first, first + 50)]
"""


@pytest.mark.thorough
def test_a_cache_of_a_killed_process_gives_the_same_rows(tmp_path: Path):
    cache = tmp_path / "cache"
    script = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parents[1]), data=str(Path(__file__).parent), cache=str(cache)
    )
    for _ in range(2):  # the second process continues the cache of the first
        run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGKILL)
        run.communicate()
    rows, source = DiskCache(Counted(200_000), cache), Counted(200_000)
    expected = source[np.arange(200_000)]
    for name, array in rows[np.arange(200_000)].items():
        np.testing.assert_array_equal(array, expected[name])
