"""Fingerprints: equal for equal data, different for different data."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import ml_dtypes
import numpy as np
import pytest

from jtrain.data import (
    Arrays,
    GrainRows,
    InOrder,
    Lines,
    LoaderBatches,
    MixedBatches,
    Packed,
    ShardedStream,
    Shuffled,
    TokenFiles,
    Windows,
    hold_out,
    make_line_rows,
    read_tokens,
)
from jtrain.data.batches.by_step import FullBatches
from jtrain.data.batches.fingerprint import (
    BLOCKS,
    _places,
    digest_batch,
    fingerprint,
    fingerprint_files,
)
from jtrain.data.images.augment import Augmentation, Augmented
from jtrain.data.images.decode import ImageSize
from jtrain.data.images.image_files import ImageFiles
from jtrain.data.text.prepare import prepare
from jtrain.data.text.random_tokens import RandomTokens
from jtrain.data.text.tokenizer import ByteTokenizer
from jtrain.data.text.tokenizing import ByteTokens

Build = Callable[[Path, int], Any]


def image(changed: int) -> np.ndarray:
    array = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 1), np.uint8)
    array[changed % 60, 0, 0, 0] += changed > 0
    return array


def rows(folder: Path, changed: int) -> Arrays:
    return Arrays(image=image(changed), label=np.arange(60, dtype=np.int32) % 10)


def text(folder: Path, changed: int) -> str:
    lines = [f"line {i} of a text" for i in range(40)]
    lines[changed % 40] += "!" * (changed > 0)
    return "\n".join(lines)


def lines(folder: Path, changed: int) -> ShardedStream:
    path = folder / "lines.txt"
    path.write_text(text(folder, changed))
    return ShardedStream(
        [path], lambda f: Lines(list(f)), make_line_rows(ByteTokenizer(), 8), size=4
    )


def tokens(folder: Path, changed: int) -> Windows:
    numbers = np.arange(500, dtype=np.uint16) % 97
    numbers[changed % 500] += changed > 0
    numbers.tofile(folder / "tokens.bin")
    return Windows(read_tokens(folder / "tokens.bin"), context=8)


def prepared(folder: Path, changed: int) -> TokenFiles:
    (folder / "text.txt").write_text(text(folder, changed))
    out = folder / f"tokens-{changed}"
    if not out.exists():
        prepare(folder / "text.txt", out, tokenizing=ByteTokens(), by="line", shard=100)
    return TokenFiles(out)


def parquet(folder: Path, changed: int) -> object:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    from jtrain.data import ParquetRows

    table = arrow.table({"x": np.arange(50) + (np.arange(50) == changed) * (changed > 0)})
    files.write_table(table, folder / "rows.parquet")
    return ParquetRows(folder / "rows.parquet")


def grain_rows(folder: Path, changed: int) -> GrainRows:
    numbers = np.arange(25, dtype=np.float32)
    numbers[changed % 25] += changed > 0
    return GrainRows(grain.MapDataset.source(numbers).map(lambda x: {"x": x}))


SOURCES: dict[str, Build] = {
    "arrays": rows,
    "tokens": tokens,
    "lines": lines,
    "a folder of tokens": lambda f, c: Windows(prepared(f, c), context=8),
    "its first part": lambda f, c: Windows(prepared(f, c).split(0.2)[0], context=8),
    "packed": lambda f, c: Packed(prepared(f, c), context=8),
    "random": lambda f, c: RandomTokens(10 + c, 8, 97),
    "Parquet": parquet,
    "Grain": grain_rows,
    "a part": lambda f, c: hold_out(rows(f, c), 0.3)[0],
    "shuffled": lambda f, c: Shuffled(rows(f, c), size=4, seed=1),
    "in order": lambda f, c: InOrder(rows(f, c), size=4),
    "full": lambda f, c: FullBatches(rows(f, c)),
    "augmented": lambda f, c: Augmented(Shuffled(rows(f, c), size=4), Augmentation(flip=0.5)),
    "mixed": lambda f, c: MixedBatches({"a": (rows(f, 0), 1), "b": (rows(f, c), 2)}, size=4),
}


@pytest.mark.parametrize("build", SOURCES.values(), ids=SOURCES)
def test_a_fingerprint_depends_on_the_rows_and_not_on_the_path(build: Build, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    known = fingerprint(build(here, 0))
    assert known
    assert fingerprint(build(here, 0)) == known
    assert fingerprint(build(there, 0)) == known
    for changed in (1, 7, 18):
        assert fingerprint(build(here, changed)) != known


@pytest.mark.parametrize("build", SOURCES.values(), ids=SOURCES)
def test_each_process_has_the_fingerprint_of_the_complete_data(build: Build, tmp_path):
    data = build(tmp_path, 0)
    if not hasattr(data, "shard"):
        data = Shuffled(data, size=4)
    assert {fingerprint(data.shard(i, 2)) for i in range(2)} == {fingerprint(data)}


def test_random_rows_and_loaders_have_no_fingerprint():
    class Drawn:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": np.random.default_rng().random(len(indices))}

    assert fingerprint(Shuffled(Drawn(), size=4)) == ""
    open_loader = lambda: iter([{"x": np.zeros(4)}])
    assert fingerprint(LoaderBatches(open_loader, size=4)) == ""


@pytest.mark.thorough
def test_blocks_spread_over_a_large_array_are_read(tmp_path: Path):
    path, count = tmp_path / "large.bin", 1 << 32
    with path.open("wb") as file:
        file.truncate(count)  # a sparse file: it takes no room on the disk

    def known(changed: int | None = None) -> str:
        array = np.memmap(path, np.uint8, "r+")
        for value in (1, 0):
            if changed is not None:
                array[changed] = value
            found = fingerprint(Arrays(x=array)) if value else found
        return found

    first = known()
    assert known() == first
    places = sorted(_places(count, 1 << 16, BLOCKS))
    for changed in (0, count - 1, places[7], places[100] + (1 << 16) - 1):
        assert known(changed) != first
    assert known(places[7] - 1) == first, "one byte between the blocks is not read"
    for part in range(100):  # but every hundredth of the array has a block
        assert any(part * count // 100 <= p < (part + 1) * count // 100 for p in places)


def test_blocks_are_the_first_the_last_and_evenly_between():
    assert list(_places(10, 4, 5)) == [0, 4, 8]
    assert list(_places(0, 4, 5)) == []
    places = sorted(_places(1_000_000, 10, 100))
    assert (places[0], places[-1]) == (0, 999_990)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) < 3 * 1_000_000 / 100


def test_the_digest_of_a_batch_is_the_same_in_every_version():
    few = np.arange(4).astype(ml_dtypes.bfloat16)
    batch = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "few": few}
    batch |= {"step": np.int32(3), "mask": np.array([True, False])}
    assert digest_batch(batch) == 5_671_974_436_504_212_866
    assert digest_batch(dict(reversed(batch.items()))) == digest_batch(batch)


def test_the_name_of_a_file_may_be_any_bytes(tmp_path: Path):
    paths = [os.fsdecode(os.fsencode(tmp_path) + b"/\xf6" + end) for end in (b"1", b"2")]  # Latin-1
    for path in paths:
        Path(path).write_bytes(b"pixels")
    one, other = (fingerprint_files([path]) for path in paths)
    assert one != other
    images = [
        ImageFiles(tmp_path, [Path(path).name], np.zeros(1), size=ImageSize(height=2, width=2))
        for path in paths
    ]
    assert images[0].fingerprint() != images[1].fingerprint()
