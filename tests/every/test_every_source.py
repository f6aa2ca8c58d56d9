"""What every source promises. A new member is a new row of SOURCES."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import grain
import numpy as np
import pytest
from comparison import assert_same
from image_files import write_digits, write_idx, write_image_folder, write_records

from jtrain.data import (
    Arrays,
    GrainRows,
    Shuffled,
    Source,
    Vocabulary,
    Windows,
    read_text,
)
from jtrain.data.batches.prefetch import ThreadWorkers
from jtrain.data.batches.process_workers import serialize
from jtrain.data.batches.row_cache import DiskCache, MemoryCache
from jtrain.data.images.image_dataset import read_labelled
from jtrain.data.images.image_folder import ImageFolder
from jtrain.data.known_sets import Shakespeare, read_digits
from jtrain.data.sources.records import TFRecords
from jtrain.data.text.corpora import UniformTokens
from jtrain.data.text.prepare import prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.token_rows import Packed
from jtrain.data.text.tokenizing import ByteTokens

TOKENS = np.random.default_rng(0).integers(0, 1000, 83).astype(np.uint16)
VERSE = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"


def arrays(_: Path) -> Source:
    rng = np.random.default_rng(1)
    return Arrays(image=rng.random((77, 4, 3), np.float32), label=rng.integers(0, 9, 77))


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


def digits(folder: Path) -> Source:
    return read_digits(write_digits(folder) / "digits.csv.gz")


def tf_records(folder: Path) -> Source:
    write_records(folder / "rows.tfrecord", [np.full(5, i, np.int32).tobytes() for i in range(37)])
    rows = grain.MapDataset.source(TFRecords(folder / "rows.tfrecord"))
    return GrainRows(rows.map(lambda record: {"x": np.frombuffer(record, np.int32)}))


def shakespeare(_: Path) -> Source:
    return Shakespeare(context=32).build().train


SOURCES = [
    *(arrays, random_tokens, text_files, token_folder, packed_array, packed_folder),
    *(grain_dicts, grain_tuples, idx_files, image_folder, cached_in_memory, cached_on_disk),
    *(digits, tf_records, shakespeare),
]
PINNED = "f9d6cf17893b76d62d7b250247fbe36339c5794d77e571d911dbf0127e5f20a8"
FIRST = 300  # rows looked at one by one: all, where the source is not large


@pytest.fixture(params=SOURCES, ids=lambda build: build.__name__)
def build(request, tmp_path: Path) -> Callable[[], Source]:
    return lambda: request.param(tmp_path)


def in_sequence(source: Source) -> dict[str, np.ndarray]:
    return source[np.arange(min(len(source), FIRST))]


@pytest.mark.thorough
def test_rows_by_index_are_the_rows_in_sequence_however_often_it_is_built(build):
    source, expected = build(), in_sequence(build())
    count = len(next(iter(expected.values())))
    assert {(len(rows), rows.dtype.kind in "biuf") for rows in expected.values()} == {(count, True)}
    for indices in (np.random.default_rng(0).permutation(count), np.array([count - 1, 0, 2, 2])):
        assert_same(source[indices], {name: rows[indices] for name, rows in expected.items()})


def test_what_is_done_to_a_batch_does_not_reach_the_data(build: Callable[[], Source]):
    source = build()
    before = in_sequence(source)
    kept = {name: rows.copy() for name, rows in before.items()}
    for rows in before.values():
        rows[...] = 0
    assert_same(in_sequence(source), kept)


def test_threads_and_another_process_read_the_same(build: Callable[[], Source]):
    source = build()
    sent = cloudpickle.loads(serialize(source.__getitem__, 1)).__self__
    batches = Shuffled(source, size=4, seed=1)
    reader = ThreadWorkers([batches.__getitem__] * 3, start=2, stop=12)
    for step in range(2, 12):
        assert_same(reader(step), Shuffled(sent, size=4, seed=1)[step])
    reader.close()


def test_the_data_of_a_run_are_pinned():
    batch = Shuffled(Shakespeare(context=64).build().train, size=12, seed=0)[1000]
    digest = hashlib.sha256(batch["tokens"].astype("<i4").tobytes()).hexdigest()
    assert digest == PINNED
