"""Mistakes in data: what each is told, and that doing what it says works.

A row is what was done, the three parts of the answer (what was asked, what was found, what to
type), and what was typed then.
"""
# ruff: noqa: E501  (a case reads best on few lines)

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import pytest
from image_files import alone_here, idx_bytes, write_records

from jtrain.data import (
    Arrays,
    GrainRows,
    Shuffled,
    Subset,
    TFRecords,
    Vocabulary,
    Windows,
    check_finite,
    check_labels,
    read_example,
    read_idx,
    read_text,
)
from jtrain.data.batches.stream import shard_files
from jtrain.data.images.augment import Augment
from jtrain.data.text.corpora import Text
from jtrain.errors import ConfigError, DataError

TEN = Arrays(x=np.arange(10))
TOKENS = np.arange(20, dtype=np.uint16)
HOLED = np.array([[1.0, 2.0], [3.0, np.nan]], np.float32)
LABELLED = Arrays(label=np.array([0, 9, 10]))
MASKED = np.ma.array([1.0, 1e20], mask=[False, True])
ELEMENTS = grain.MapDataset.range(4)


FLAT = np.zeros((8, 16), np.float32)
SQUARE = FLAT.reshape(8, 4, 4)
EIGHT = np.arange(8) + 3


def augmented(augment: Augment, classes: int = 10, **arrays: np.ndarray) -> Any:
    return augment.build(Shuffled(Arrays(**arrays), size=8), classes=classes)[0]


class Case(NamedTuple):
    name: str
    wrong: Callable[[Path], Any]
    says: tuple[str, ...]
    right: Callable[[Path], Any]
    error: type[Exception] = DataError


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


CASES = [
    Case("unequal lengths", lambda _: Arrays(image=np.zeros((5, 2)), label=np.zeros(4)),
        ("one length", "image 5, label 4", "Cut them to 4 rows"),
        lambda _: Arrays(image=np.zeros((5, 2))[:4], label=np.zeros(4))),
    Case("rows of several lengths", lambda _: Arrays(tokens=[[1, 2, 3], [4]]),
        ("rows of `tokens` have no common shape", "Pad them to the longest row"),
        lambda _: Arrays(tokens=[[1, 2, 3], [4, 0, 0]], length=[3, 1])),
    Case("a masked array", lambda _: Arrays(x=MASKED), ("`x` is a masked array", "x.filled(0)",
        "real=~x.mask"), lambda _: Arrays(x=MASKED.filled(0), real=~MASKED.mask)),
    Case("a reserved name", lambda _: Shuffled(Arrays(mask=np.ones(3)), size=1)[0], ("'mask'",
        "adds to every batch", "such as masks"), lambda _: Shuffled(Arrays(masks=np.ones(3)),
        size=1)[0]),
    Case("an empty data set", lambda _: Shuffled(GrainRows(ELEMENTS.slice(slice(0, 0))), size=4),
        ("data set is empty", "GrainRows has 0 rows", "at least 1 row"), lambda _: Shuffled(TEN,
        size=4)),
    Case("a batch that does not divide into processes", lambda _: Shuffled(TEN, size=10).shard(0,
        4), ("batch 10", "4 processes", "8 or 12 (batch=8)"), lambda _: (Shuffled(TEN,
        size=8).shard(0, 4)[0], Shuffled(TEN, size=12).shard(0, 4)[0]), ConfigError),
    Case("not a number in the data", lambda _: check_finite(Arrays(image=HOLED)), ("finite",
        "row 1 of `image` has nan at [1]", "np.nan_to_num(image)"),
        lambda _: check_finite(Arrays(image=np.nan_to_num(HOLED)))),
    Case("a label out of range", lambda _: check_labels(LABELLED, 10), ("10 classes",
        "row 2 of `label` is 10", "classes=11", "label - 1"), lambda _: check_labels(LABELLED, 11)),
    Case("a context longer than the text", lambda _: Windows(TOKENS, context=20), ("context 20",
        "20 tokens", "longest is 19", "context=19"), lambda _: Windows(TOKENS,
        context=19)[np.arange(1)]),
    Case("a stride that skips tokens", lambda _: Windows(TOKENS, context=4, stride=8), ("stride 8",
        "1 .. 4", "skip tokens", "stride=4", "stride=1"), lambda _: (Windows(TOKENS, context=4,
        stride=4), Windows(TOKENS, context=4, stride=1))),
    Case("a misspelt file", lambda d: (write(d / "hamlet.txt", b"words"),
        read_text(d / "hamelt.txt")), ("hamelt.txt: no such file", "Did you mean path=",
        "hamlet.txt?"), lambda d: read_text(write(d / "hamlet.txt", b"words"))),
    Case("a character that training never saw", lambda _: Vocabulary("abc \n").encode("ab\nc z"),
        ("'z' at line 2, column 3", "5 of the vocabulary", "Vocabulary(train + validation)"),
        lambda _: Vocabulary("abc \n" + "ab\nc z").encode("ab\nc z")),
    Case("a text too short to keep a part of", lambda d: Text(path=str(write(d / "a.txt",
        b"word " * 20)), context=64).build(), ("context 64 does not fit 10 tokens",
        "context=9"), lambda d: Text(path=str(write(d / "a.txt",
        b"word " * 20)), context=9).build()),
    Case("elements that are not dicts", lambda _: GrainRows(ELEMENTS)[np.arange(2)],
        ("Element 0 is a ", "not a dict", "dataset.map(lambda x: {'image': x})"),
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"image": x}))[np.arange(2)]),
    Case("elements of different shapes",
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"x": np.zeros(1 + x // 2)}))[np.arange(4)],
        ("one shape", "element 2 has {'x': (2,)}", "{'x': (1,)}", "dataset.map(crop_or_pad)"),
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"x": np.zeros(1 + x // 2)}).map(lambda e: {"x": e["x"][:1]}))[np.arange(4)]),
    Case("a packed file without .gz", lambda folder: read_idx(write(folder / "images",
        gzip.compress(idx_bytes(FLAT)))), ("begins with 00 00", "at byte 0 it has 1f 8b",
        "is named .gz"), lambda folder: read_idx(write(folder / "images.gz",
        gzip.compress(idx_bytes(FLAT))))),
    Case("a row of a subset that is not there", lambda _: Subset(Arrays(x=EIGHT), np.arange(9)),
        ("row 8 of 8", "counted from 0", "indices[indices < 8]"), lambda _: Subset(Arrays(x=EIGHT),
        (indices := np.arange(9))[indices < 8])),
    Case("a crop wider than the image", lambda _: augmented(Augment(crop=4), image=SQUARE),
        ("augment.crop=4", "4 x 4", "Set augment.crop=1"), lambda _: augmented(Augment(crop=1),
        image=SQUARE)),
    Case("records that are not examples",
        lambda folder: read_example(TFRecords(write_records(folder / "a", [b"\x89PNG"]))[0]),
        ("tf.train.Example", "89 50 4e 47", "{'x': np.frombuffer(record, 'uint8')}"),
        lambda folder: GrainRows(grain.MapDataset.source(TFRecords(write_records(folder / "a",
        [b"\x89PNG"]))).map(lambda record: {"x": np.frombuffer(record, "uint8")}))[np.array([0])]),
    Case("fewer files than processes", lambda folder: shard_files([folder], index=0, count=2,
        policy="file"), ("sharing=file", "1 file, 2 processes", "Set sharing=data"),
        lambda folder: shard_files([folder], index=0, count=2, policy="data")),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the only one in which sets are searched."""
    alone_here(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_says_what_is_wrong_and_what_to_type(case: Case, folder: Path):
    with pytest.raises(case.error) as caught:
        case.wrong(folder)
    for part in case.says:
        assert part in str(caught.value)
    case.right(folder)  # raises if following the advice does not help
