"""What every source promises. A new member is a new row of SOURCES."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import grain
import numpy as np
import pytest
from image_files import write_digits, write_idx, write_image_folder, write_records

from jtrain.data import (
    Arrays,
    GrainRows,
    InOrder,
    ReadAhead,
    Shuffled,
    Source,
    Vocabulary,
    Windows,
    read_text,
    read_tokens,
)
from jtrain.data.batches.process_workers import serialize
from jtrain.data.batches.row_cache import DiskCache, MemoryCache
from jtrain.data.batches.workers import ThreadWorkers
from jtrain.data.images.digits import read_digits
from jtrain.data.images.image_dataset import read_labelled
from jtrain.data.images.image_folder import ImageFolder
from jtrain.data.sources.interleaved import Interleaved
from jtrain.data.sources.subset import hold_out
from jtrain.data.sources.tfrecord import TFRecords
from jtrain.data.text.packed import Packed
from jtrain.data.text.prepare import prepare
from jtrain.data.text.random_tokens import UniformTokens
from jtrain.data.text.shakespeare import Shakespeare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.tokenizing import ByteTokens

TOKENS = np.random.default_rng(0).integers(0, 1000, 83).astype(np.uint16)
VERSE = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"


def arrays(_: Path) -> Source:
    rng = np.random.default_rng(1)
    return Arrays(image=rng.random((77, 4, 3), np.float32), label=rng.integers(0, 9, 77))


def token_file(folder: Path) -> Source:
    np.save(folder / "tokens.npy", TOKENS)
    return Windows(read_tokens(folder / "tokens.npy"), context=8)


def raw_token_file(folder: Path) -> Source:
    TOKENS.tofile(folder / "tokens.bin")
    return Windows(read_tokens(folder / "tokens.bin"), context=8, stride=8)


def random_tokens(_: Path) -> Source:
    return UniformTokens(vocab=97, context=12, rows=70).build().train


def text_files(folder: Path) -> Source:
    (folder / "1.txt").write_text(VERSE, encoding="utf-8")
    (folder / "2.txt").write_text(VERSE.upper(), encoding="utf-8")
    text = read_text(str(folder / "*.txt"))
    return Windows(Vocabulary(text).encode(text), context=16, stride=3)


def prepared(folder: Path) -> TokenFiles:
    (folder / "plays.txt").write_text(VERSE, encoding="utf-8")
    prepare(folder / "plays.txt", folder / "plays", tokenizing=ByteTokens(), by="line", shard=23)
    return TokenFiles(folder / "plays")


def token_folder(folder: Path) -> Source:
    return Windows(prepared(folder), context=16, stride=3)


def packed_array(_: Path) -> Source:
    edges = np.cumsum([0, 3, 1, 9, 2, 30, 5, 4, 4, 8, 17])
    return Packed(TOKENS, context=8, documents=edges)


def packed_folder(folder: Path) -> Source:
    return Packed(prepared(folder), context=5)


def grain_dicts(_: Path) -> Source:
    rows = grain.MapDataset.source(list(range(50)))
    return GrainRows(rows.map(lambda i: {"x": np.full(3, i, np.float32), "label": i % 7}))


def grain_tuples(_: Path) -> Source:
    rows = grain.MapDataset.range(31).map(lambda i: (np.arange(i, i + 2), i))
    return GrainRows(rows, names=["x", "label"])


def idx_files(folder: Path) -> Source:
    image = np.random.default_rng(2).integers(0, 256, (45, 6, 5), np.uint8)
    images = write_idx(folder / "images", image)
    return read_labelled(images, write_idx(folder / "labels.gz", image[:, 0, 0] % 9), classes=9)


def image_folder(folder: Path) -> Source:
    write_image_folder(folder / "images", classes=4, each=12)
    return ImageFolder(folder=str(folder / "images"), height=8, width=9).build().train


def cached_in_memory(folder: Path) -> Source:
    return MemoryCache(image_folder(folder))


def cached_on_disk(folder: Path) -> Source:
    return DiskCache(image_folder(folder), folder / "cache")


def interleaved(folder: Path) -> Source:
    return Interleaved([idx_files(folder), hold_out(idx_files(folder), 0.2)[1]])


def rows_kept_back(folder: Path) -> Source:
    return hold_out(idx_files(folder), 0.4)[1]


def digits(folder: Path) -> Source:
    return read_digits(write_digits(folder) / "digits.csv.gz")


def tf_records(folder: Path) -> Source:
    write_records(folder / "rows.tfrecord", [np.full(5, i, np.int32).tobytes() for i in range(37)])
    rows = grain.MapDataset.source(TFRecords(folder / "rows.tfrecord"))
    return GrainRows(rows.map(lambda record: {"x": np.frombuffer(record, np.int32)}))


def shakespeare(_: Path) -> Source:
    return Shakespeare(context=32).build().train


def shakespeare_to_judge_by(_: Path) -> Source:
    return Shakespeare(context=4096).build().validation


SOURCES = [
    arrays,
    token_file,
    raw_token_file,
    random_tokens,
    text_files,
    token_folder,
    packed_array,
    packed_folder,
    grain_dicts,
    grain_tuples,
    idx_files,
    image_folder,
    cached_in_memory,
    cached_on_disk,
    interleaved,
    rows_kept_back,
    digits,
    tf_records,
    shakespeare,
    shakespeare_to_judge_by,
]
PINNED = "f9d6cf17893b76d62d7b250247fbe36339c5794d77e571d911dbf0127e5f20a8"
FIRST = 300  # rows looked at one by one: all, where the source is not large


@pytest.fixture(params=SOURCES, ids=lambda build: build.__name__)
def build(request, tmp_path: Path) -> Callable[[], Source]:
    return lambda: request.param(tmp_path)


@pytest.fixture
def source(build: Callable[[], Source]) -> Source:
    return build()


class Watched:
    """A source that remembers which rows were read."""

    def __init__(self, source: Source):
        self.source, self.read = source, list[int]()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        self.read += indices.tolist()
        return self.source[indices]


def in_sequence(source: Source) -> dict[str, np.ndarray]:
    return source[np.arange(min(len(source), FIRST))]


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name, strict=True)


def joined(parts: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    parts_ = list(parts)
    return {name: np.concatenate([part[name] for part in parts_]) for name in parts_[0]}


def test_is_the_same_when_built_again(build: Callable[[], Source]):
    assert_same(in_sequence(build()), in_sequence(build()))


def test_rows_by_index_are_the_rows_in_sequence(source: Source):
    expected = in_sequence(source)
    count = len(next(iter(expected.values())))
    for indices in (
        np.random.default_rng(0).permutation(count),
        np.array([count - 1]),
        np.array([2, 0, 2, 2]),
    ):
        assert_same(source[indices], {name: rows[indices] for name, rows in expected.items()})


def test_every_array_counts_the_rows_and_holds_numbers(source: Source):
    for rows in source[np.array([len(source) - 1, 0, 1])].values():
        assert len(rows) == 3
        assert rows.dtype.kind in "biuf"


def test_what_is_done_to_a_batch_does_not_reach_the_data(source: Source):
    before = in_sequence(source)
    kept = {name: rows.copy() for name, rows in before.items()}
    for rows in before.values():
        rows[...] = 0
    assert_same(in_sequence(source), kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", ["cross", "drop", "pad"])
def test_goes_on_in_the_middle_of_an_epoch(build: Callable[[], Source], end: str):
    whole = Shuffled(build(), size=8, seed=3, end=end)
    expected = [whole[step] for step in range(12)]
    source = Watched(build())
    for step in (11, 5, 0):
        source.read.clear()
        assert_same(Shuffled(source, size=8, seed=3, end=end)[step], expected[step])
        assert len(source.read) == 8, "a batch reads its own rows and no others"


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_a_batch_out(source: Source, count: int):
    whole = Shuffled(source, size=8, seed=5)
    watched = [Watched(source) for _ in range(count)]
    parts = [Shuffled(w, size=8, seed=5).shard(i, count) for i, w in enumerate(watched)]
    for step in range(6):
        assert_same(joined(part[step] for part in parts), whole[step])
    assert {len(w.read) for w in watched} == {6 * 8 // count}


def test_no_two_processes_read_the_same_row_in_an_epoch(source: Source):
    steps = min(len(source) // 8, 20)
    assert steps > 0
    read = []
    for index in range(4):
        watched = Watched(source)
        batches = Shuffled(watched, size=8).shard(index, 4)
        for step in range(steps):
            batches[step]
        read += watched.read
    assert len(set(read)) == len(read) == 8 * steps


@pytest.mark.parametrize("count", [1, 4])
def test_the_ragged_end_is_exact(source: Source, count: int):
    source = Only(source, min(len(source), FIRST))
    size = 12
    parts = [InOrder(source, size=size).shard(index, count) for index in range(count)]
    assert all(len(part) == -(-len(source) // size) for part in parts)
    batches = [joined(part[step] for part in parts) for step in range(len(parts[0]))]
    for batch in batches:
        assert batch["row"].tolist() == list(range(size))
    whole = joined(iter(batches))
    real = {
        name: rows[whole["mask"]] for name, rows in whole.items() if name not in ("row", "mask")
    }
    assert_same(real, in_sequence(source))


class Only:
    """The first rows of a source."""

    def __init__(self, source: Source, rows: int):
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        assert indices.max() < self.rows
        return self.source[indices]


def test_is_the_same_when_read_ahead(source: Source):
    batches = Shuffled(source, size=4, seed=1)
    with ReadAhead(batches.__getitem__, start=2, stop=30, slow=0.0) as ahead:
        for step, batch in enumerate(ahead, 2):
            assert_same(batch, batches[step])
    assert step == 29


def test_is_the_same_when_several_threads_read(source: Source):
    batches = Shuffled(source, size=4, seed=1)
    reader = ThreadWorkers(batches.__getitem__, start=2, stop=30, workers=3)
    for step in range(2, 30):
        assert_same(reader(step), batches[step])
    reader.close()


def test_is_the_same_when_it_was_sent_to_another_process(source: Source):
    """As it is sent to a reading worker."""
    sent = cloudpickle.loads(serialize(source.__getitem__, 1))
    assert_same(in_sequence(sent.__self__), in_sequence(source))


PROCESS = """
import hashlib, json, sys
import numpy as np
from jtrain.data import Shuffled, Windows, read_tokens
folder, index = sys.argv[1], int(sys.argv[2])
batches = Shuffled(Windows(read_tokens(folder + "/tokens.npy"), context=8), size=8, seed=9)
batches = batches.shard(index, 2)
rows = [batches[step]["tokens"].tolist() for step in range(20)]
print(json.dumps({"rows": rows, "jax": "jax" in sys.modules}))
"""


def test_two_processes_together_read_what_one_reads(tmp_path: Path):
    whole = Shuffled(token_file(tmp_path), size=8, seed=9)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(index)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    assert not any(answer["jax"] for answer in answers), "reading needs no JAX"
    for step in range(20):
        rows = answers[0]["rows"][step] + answers[1]["rows"][step]
        assert rows == whole[step]["tokens"].tolist()


def test_the_data_of_a_run_are_pinned():
    batch = Shuffled(Shakespeare(context=64).build().train, size=12, seed=0)[1000]
    digest = hashlib.sha256(batch["tokens"].astype("<i4").tobytes()).hexdigest()
    assert digest == PINNED
