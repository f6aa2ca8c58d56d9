import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jtrain.data import Arrays, Shuffled
from jtrain.data.batches.stacked import StackedBatches
from jtrain.data.batches.stream import Stream, Streamed
from jtrain.data.sources.lines import Lines, make_line_rows
from jtrain.data.text.tokenizer import ByteTokenizer
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


def test_a_buffer_of_one_keeps_the_order(files: list[Path]):
    assert some(Lines(files, buffer=1), 2 * 57 + 5) == [*LINES, *LINES, *LINES[:5]]


def test_each_line_occurs_once_an_epoch_except_for_the_buffer(files: list[Path]):
    found = some(Lines(files, buffer=10), 57 * 20)
    counts = Counter(found)
    assert set(counts) == set(LINES)
    # So far 57 x 20 lines and the 10 in the buffer were read: each line 20 or 21 times.
    assert sum(abs(counts[line] - 20) for line in LINES) <= 20
    assert found[:57] != LINES
    assert some(Lines(files, buffer=10, seed=1), 57) != found[:57]


@pytest.mark.parametrize("buffer", [1, 10, 200])
@pytest.mark.parametrize("before", [0, 1, 56, 57, 133])
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


def test_only_the_needed_places_are_saved(files: list[Path]):
    long = Streamed(
        lambda: Lines(files, buffer=10), lambda line: {"x": np.int32(len(line))}, size=2, every=1
    )
    for step in range(100):
        long[step]
    assert [long.state(step)["step"] for step in (99, 84, 83, 5)] == [99, 84, 0, 0]


def test_stacked_batches_save_the_state_of_their_batches(files: list[Path]):
    calls, again = StackedBatches(batches(files), 4), StackedBatches(batches(files), 4)
    expected = [calls[call]["tokens"].tolist() for call in range(5)]
    kept = calls.state(12)
    assert kept["step"] == 10
    again.restore(kept)
    assert again[3]["tokens"].tolist() == expected[3]
    plain = StackedBatches(Shuffled(Arrays(x=np.arange(9)), size=4))
    assert plain.state(7) == {}
    plain.restore({})


def test_rows_of_lines_have_an_end_token_and_are_cut():
    row = make_line_rows(ByteTokenizer(), 4)
    assert row("abc")["tokens"].tolist() == [97, 98, 99, 256, 0]
    assert row("abc")["length"] == 3
    assert row("abcdefg")["tokens"].tolist() == [97, 98, 99, 100, 101]
    assert row("abcdefg")["length"] == 4


def test_invalid_streams_are_refused_and_the_advice_works(files: list[Path], tmp_path: Path):
    with pytest.raises(DataError, match="Set buffer=1"):
        Lines(files, buffer=0)
    (tmp_path / "c.txt").write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"c.txt has no line with text"):
        Lines(tmp_path / "c.txt", buffer=1).next()
    state = Lines(files).state()
    held = files[0].read_text(encoding="utf-8")
    files[0].write_text("another text", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.txt.*Put them back"):
        Lines(files).restore(state)
    files[0].write_text(held, encoding="utf-8")
    Lines(files).restore(state)
