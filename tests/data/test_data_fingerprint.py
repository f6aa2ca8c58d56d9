"""Fingerprints: equal for equal data, different for different data."""

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
    Lines,
    LoaderBatches,
    MixedBatches,
    ShardedStream,
    Shuffled,
    TokenFiles,
    Windows,
    hold_out,
    make_line_rows,
)
from jtrain.data.batches.fingerprint import digest_batch, fingerprint
from jtrain.data.images.augment import Augment, Augmented
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizers import ByteTokenizer
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
    rows = make_line_rows(ByteTokenizer(), 8)
    return ShardedStream([path], lambda f: Lines(list(f)), rows, size=4)


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
    "arrays": rows, "lines": lines,
    "a folder of tokens": lambda f, c: Windows(prepared(f, c), context=8), "Parquet": parquet,
    "Grain": grain_rows, "a part": lambda f, c: hold_out(rows(f, c), 0.3)[0],
    "shuffled": lambda f, c: Shuffled(rows(f, c), size=4, seed=1),
    "augmented": lambda f, c: Augmented(Shuffled(rows(f, c), size=4), Augment(flip=0.5)),
    "mixed": lambda f, c: MixedBatches({"a": (rows(f, 0), 1), "b": (rows(f, c), 2)}, size=4),
}  # fmt: skip


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


@pytest.mark.parametrize("build", [SOURCES["shuffled"], SOURCES["lines"], SOURCES["mixed"]])
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


def test_the_digest_of_a_batch_is_the_same_in_every_version():
    few = np.arange(4).astype(ml_dtypes.bfloat16)
    batch = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "few": few}
    batch |= {"step": np.int32(3), "mask": np.array([True, False])}
    assert digest_batch(batch) == 5_671_974_436_504_212_866
    assert digest_batch(dict(reversed(batch.items()))) == digest_batch(batch)
