"""Interleaving: every row once, in the order of the turns."""

import json
from pathlib import Path

import numpy as np
import pytest

from jtrain.data import Arrays, InOrder, Lines
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.sources.interleaved import Interleaved, InterleavedStream
from jtrain.data.text.line_corpus import TextLines
from jtrain.errors import DataError


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


@pytest.mark.parametrize("lengths", [(3,), (3, 3), (1, 5, 3), (4, 0, 2), (2, 7, 7, 1, 2)])
def test_rows_come_in_turn(lengths: tuple[int, ...]):
    source, expected = Interleaved(numbered(*lengths)), by_hand(*lengths)
    assert len(source) == len(expected)
    assert source[np.arange(len(source))]["x"].tolist() == expected
    mixed = np.random.default_rng(0).permutation(len(source))
    assert source[mixed]["x"].tolist() == [expected[i] for i in mixed]
    assert [int(batch["x"][0]) for batch in map(InOrder(source, size=1).__getitem__, [0])] == [0]


def test_sources_without_a_row_or_of_two_shapes_are_reported():
    empty = Numbered(0, 0)
    with pytest.raises(DataError, match="2 sources should be read in turn, and none has a row"):
        Interleaved([empty, empty])
    odd = Interleaved([Arrays(x=np.zeros((2, 2))), Arrays(x=np.zeros((2, 3)))])
    with pytest.raises(DataError, match=r"`x` of source 1 is float64 \(3,\) where it was"):
        odd[np.arange(2)]


def test_the_fingerprint_depends_on_each_source():
    assert fingerprint(Interleaved(numbered(3, 2))) == fingerprint(Interleaved(numbered(3, 2)))
    assert fingerprint(Interleaved(numbered(3, 2))) != fingerprint(Interleaved(numbered(2, 3)))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for number, lines in enumerate([5, 3, 4, 2]):
        text = "".join(f"{number} {line}\n" for line in range(lines))
        (tmp_path / f"{number}.txt").write_text(text)
    return sorted(tmp_path.glob("*.txt"))


def test_streams_take_turns_and_resume_from_a_saved_state(files: list[Path]):
    open_stream = lambda: InterleavedStream([Lines(path, buffer=1) for path in files[:3]])
    stream = open_stream()
    began = [stream.next() for _ in range(7)]
    assert began == ["0 0", "1 0", "2 0", "0 1", "1 1", "2 1", "0 2"]
    state = json.loads(json.dumps(stream.state()))
    after = [stream.next() for _ in range(20)]
    again = open_stream()
    again.restore(state)
    assert [again.next() for _ in range(20)] == after
    with pytest.raises(DataError, match=r"2 streams are read in turn .* data\.interleave=3"):
        InterleavedStream([Lines(path) for path in files[:2]]).restore(state)


@pytest.mark.parametrize("buffer", [1, 6])
def test_a_corpus_reads_files_in_turn_and_every_line_of_an_epoch(files: list[Path], buffer: int):
    """Read files of one length, so that all epochs end together."""
    for path in files:
        path.write_text("".join(f"{path.stem} {line}\n" for line in range(4)))
    pattern = str(files[0].parent / "*.txt")
    how = {"buffer": buffer, "interleave": 2, "sharing": "data"}
    corpus = TextLines(path=pattern, validation=pattern, context=8, **how)
    one, other = (corpus.build().shuffled(size=4, seed=1) for _ in range(2))
    batches = [one[step]["tokens"] for step in range(8)]
    np.testing.assert_array_equal(other[7]["tokens"], batches[7])
    lines = {bytes(row[:3].astype(np.uint8)) for batch in batches for row in batch}
    assert len(lines) == 16 if buffer == 1 else len(lines) > 12
    firsts = [{row[0] for row in batch} for batch in batches]
    assert all(len(first) >= 2 for first in firsts), "lines of at least two files in every batch"
    halves = [one.shard(i, 2)[3]["tokens"] for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), batches[3])
