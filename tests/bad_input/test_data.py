"""Mistakes in data: what each is told, and that doing what it says works.

A row is what was done, the three parts of the answer (what was asked, what was found, what to
type), and what was typed then.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import pytest

from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.data import (
    Arrays,
    GrainRows,
    InOrder,
    Shuffled,
    Vocabulary,
    Windows,
    check_finite,
    check_labels,
    read_text,
    read_tokens,
)
from jtrain.data.batches.stacked import StackedBatches
from jtrain.data.text.text import Text
from jtrain.errors import ConfigError, DataError
from jtrain.train.experiment import build_experiment
from jtrain.train.experiment_shapes import shapes

CONFIGS = Path(__file__).parents[2] / "configs"

TEN = Arrays(x=np.arange(10))
TOKENS = np.arange(20, dtype=np.uint16)
HOLED = np.array([[1.0, 2.0], [3.0, np.nan]], np.float32)
LABELLED = Arrays(label=np.array([0, 9, 10]))
MASKED = np.ma.array([1.0, 1e20], mask=[False, True])
ELEMENTS = grain.MapDataset.range(4)


class WithNumber:
    """Batches of a user, with an array beside `x` and `mask`."""

    size, ragged = 2, False

    def __init__(self, number: Any):
        self._number = number

    def __getitem__(self, step: int) -> dict[str, Any]:
        return {"x": np.zeros((2, 3)), "mask": np.ones(2, bool), "rate": self._number}

    def shard(self, index: int, count: int) -> "WithNumber":
        return self


class Case(NamedTuple):
    name: str
    wrong: Callable[[Path], Any]
    says: tuple[str, ...]
    right: Callable[[Path], Any]
    error: type[Exception] = DataError


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


CASES = [
    Case(
        "no arrays",
        lambda _: Arrays(),
        ("given no arrays", "Arrays(image=..., label=...)"),
        lambda _: Arrays(image=np.zeros((2, 4)), label=np.zeros(2)),
    ),
    Case(
        "arrays without rows",
        lambda _: Arrays(image=np.zeros((0, 28))),
        ("`image` has no rows", "(0, 28)", "at least one"),
        lambda _: Arrays(image=np.zeros((1, 28))),
    ),
    Case(
        "unequal lengths",
        lambda _: Arrays(image=np.zeros((5, 2)), label=np.zeros(4)),
        ("one length", "image 5, label 4", "Cut them to 4 rows"),
        lambda _: Arrays(image=np.zeros((5, 2))[:4], label=np.zeros(4)),
    ),
    Case(
        "an array of words",
        lambda _: Arrays(label=np.array(["cat", "dog", "cat"])),
        ("`label` holds <U3", "np.unique(label, return_inverse=True)[1]"),
        lambda _: Arrays(label=np.unique(["cat", "dog", "cat"], return_inverse=True)[1]),
    ),
    Case(
        "rows of several lengths",
        lambda _: Arrays(tokens=[[1, 2, 3], [4]]),
        ("rows of `tokens` have no common shape", "Pad them to the longest row"),
        lambda _: Arrays(tokens=[[1, 2, 3], [4, 0, 0]], length=[3, 1]),
    ),
    Case(
        "a masked array",
        lambda _: Arrays(x=MASKED),
        ("`x` is a masked array", "x.filled(0)", "real=~x.mask"),
        lambda _: Arrays(x=MASKED.filled(0), real=~MASKED.mask),
    ),
    Case(
        "a single value",
        lambda _: Arrays(x=3.0),
        ("`x` is the single value 3.0", "needs rows", "x=np.full(rows, 3.0)"),
        lambda _: Arrays(x=np.full(5, 3.0)),
    ),
    Case(
        "a reserved name",
        lambda _: Arrays(mask=np.ones(3)),
        ("'mask'", "adds to every batch", "Arrays(masks=...)"),
        lambda _: Arrays(masks=np.ones(3)),
    ),
    Case(
        "an empty data set",
        lambda _: Shuffled(GrainRows(ELEMENTS.slice(slice(0, 0))), size=4),
        ("data set is empty", "GrainRows has 0 rows", "at least 1 row"),
        lambda _: Shuffled(TEN, size=4),
    ),
    Case(
        "an empty data set to judge by",
        lambda _: InOrder(GrainRows(ELEMENTS.slice(slice(0, 0))), size=4),
        ("data set is empty", "GrainRows has 0 rows", "at least 1 row"),
        lambda _: InOrder(TEN, size=4),
    ),
    Case(
        "a batch larger than the set, with drop",
        lambda _: Shuffled(TEN, size=16, end="drop"),
        ("batch of 16", "10 rows with end=drop", "batch=10 or less, or end=cross"),
        lambda _: (Shuffled(TEN, size=10, end="drop")[0], Shuffled(TEN, size=16, end="cross")[0]),
    ),
    Case(
        "an unknown end",
        lambda _: Shuffled(TEN, size=4, end="wrap"),
        ("'wrap'", "cross, drop, pad", "end=cross"),
        lambda _: Shuffled(TEN, size=4, end="cross"),
        ConfigError,
    ),
    Case(
        "a batch that does not divide into processes",
        lambda _: Shuffled(TEN, size=10).shard(0, 4),
        ("batch 10", "4 processes", "8 or 12 (batch=8)"),
        lambda _: (Shuffled(TEN, size=8).shard(0, 4)[0], Shuffled(TEN, size=12).shard(0, 4)[0]),
        ConfigError,
    ),
    Case(
        "a batch smaller than the processes",
        lambda _: InOrder(TEN, size=3).shard(0, 4),
        ("batch 3", "4 processes", "Nearest: batch=4."),
        lambda _: InOrder(TEN, size=4).shard(0, 4)[0],
        ConfigError,
    ),
    Case(
        "a batch of nothing",
        lambda _: Shuffled(TEN, size=0),
        ("batch of 0", "batch=1 or more"),
        lambda _: Shuffled(TEN, size=1)[0],
        ConfigError,
    ),
    Case(
        "a process that is not there",
        lambda _: Shuffled(TEN, size=4).shard(2, 2),
        ("Process 2 of 2", "count from 0", "0 .. 1"),
        lambda _: Shuffled(TEN, size=4).shard(1, 2),
        ConfigError,
    ),
    Case(
        "not a number in the data",
        lambda _: check_finite(Arrays(image=HOLED)),
        ("finite", "row 1 of `image` has nan at [1]", "np.nan_to_num(image)"),
        lambda _: check_finite(Arrays(image=np.nan_to_num(HOLED))),
    ),
    Case(
        "a label out of range",
        lambda _: check_labels(LABELLED, 10),
        ("10 classes", "row 2 of `label` is 10", "classes=11", "label - 1"),
        lambda _: check_labels(LABELLED, 11),
    ),
    Case(
        "a negative label",
        lambda _: check_labels(Arrays(label=np.array([0, -1])), 10),
        ("0 .. 9", "row 1 of `label` is -1", "count from 0"),
        lambda _: check_labels(Arrays(label=np.array([0, 1])), 10),
    ),
    Case(
        "labels that are no whole numbers",
        lambda _: check_labels(Arrays(label=np.array([0.0, 1.0])), 2),
        ("whole numbers in 0 .. 1", "float64", "label.astype('int32')"),
        lambda _: check_labels(Arrays(label=np.array([0.0, 1.0]).astype("int32")), 2),
    ),
    Case(
        "labels of another name",
        lambda _: check_labels(Arrays(target=np.array([0, 1])), 2),
        ("`label`", "a row has target", "name='target'"),
        lambda _: check_labels(Arrays(target=np.array([0, 1])), 2, name="target"),
    ),
    Case(
        "a context longer than the text",
        lambda _: Windows(TOKENS, context=20),
        ("context 20", "20 tokens", "longest is 19", "context=19"),
        lambda _: Windows(TOKENS, context=19)[np.arange(1)],
    ),
    Case(
        "a context of nothing",
        lambda _: Windows(TOKENS, context=0),
        ("context 0", "context=1 "),
        lambda _: Windows(TOKENS, context=1),
    ),
    Case(
        "a text of one token",
        lambda _: Windows(TOKENS[:1], context=4),
        ("context 4", "1 tokens", "at least 2"),
        lambda _: Windows(TOKENS[:2], context=1),
    ),
    Case(
        "a stride that skips tokens",
        lambda _: Windows(TOKENS, context=4, stride=8),
        ("stride 8", "1 .. 4", "skip tokens", "stride=4", "stride=1"),
        lambda _: (Windows(TOKENS, context=4, stride=4), Windows(TOKENS, context=4, stride=1)),
    ),
    Case(
        "tokens in rows and columns",
        lambda _: Windows(TOKENS.reshape(4, 5), context=4),
        ("one row of whole numbers", "(4, 5)", "tokens.ravel().astype('uint16')"),
        lambda _: Windows(TOKENS.reshape(4, 5).ravel().astype("uint16"), context=4),
    ),
    Case(
        "a file of tokens of another type",
        lambda d: read_tokens(write(d / "t.bin", b"12345")),
        ("uint16 tokens of 2 bytes", "5 bytes", "Set the dtype", "uint8"),
        lambda d: read_tokens(write(d / "t.bin", b"12345"), dtype="uint8"),
    ),
    Case(
        "tokens of an unknown type",
        lambda d: read_tokens(write(d / "t.bin", b"1234"), dtype="int7"),
        ("'int7'", "uint8, uint16, uint32, int32", "dtype=uint16"),
        lambda d: read_tokens(write(d / "t.bin", b"1234"), dtype="uint16"),
    ),
    Case(
        "a numpy file cut short",
        lambda d: read_tokens(
            write(d / "t.npy", saved(d / "whole.npy", TOKENS).read_bytes()[:140])
        ),
        ("t.npy", "not a complete .npy file", "np.save(path, tokens)"),
        lambda d: read_tokens(saved(d / "t.npy", TOKENS)),
    ),
    Case(
        "a numpy file of fractions",
        lambda d: read_tokens(saved(d / "t.npy", np.ones((2, 2)))),
        ("one row of tokens", "float64 of shape (2, 2)", "tokens.ravel().astype('uint16')"),
        lambda d: read_tokens(saved(d / "t.npy", np.ones((2, 2)).ravel().astype("uint16"))),
    ),
    Case(
        "a misspelt file",
        lambda d: (write(d / "hamlet.txt", b"words"), read_text(d / "hamelt.txt")),
        ("hamelt.txt: no such file", "Did you mean path=", "hamlet.txt?"),
        lambda d: read_text(write(d / "hamlet.txt", b"words")),
    ),
    Case(
        "a file in a folder that is not there",
        lambda d: read_text(d / "plays" / "hamlet.txt"),
        ("no such file", "no folder", "set path="),
        lambda d: read_text(write(d / "hamlet.txt", b"words")),
    ),
    Case(
        "a pattern without a match",
        lambda d: (write(d / "hamlet.txt", b"words"), read_text(str(d / "*.md"))),
        ("*.md: no such file", "holds hamlet.txt", "set path="),
        lambda d: (write(d / "hamlet.txt", b"words"), read_text(str(d / "*.txt"))),
    ),
    Case(
        "a folder for a file",
        lambda d: read_text(d),
        ("is a folder", "Name its files: path=", "/*"),
        lambda d: (write(d / "hamlet.txt", b"words"), read_text(f"{d}/*")),
    ),
    Case(
        "no files",
        lambda _: read_text([]),
        ("list of files is empty", "at least one"),
        lambda d: read_text([write(d / "a.txt", b"words")]),
    ),
    Case(
        "a file that is not UTF-8",
        lambda d: read_text(write(d / "a.txt", b"fine\ncaf\xe9\n")),
        ("a.txt:2 is not UTF-8", "0xe9 at 8", "iconv -f latin1 -t utf-8"),
        lambda d: read_text(write(d / "a.txt", b"fine\ncaf\xe9\n".decode("latin1").encode())),
    ),
    Case(
        "an empty file",
        lambda d: read_text(write(d / "a.txt", b"")),
        ("a.txt", "no character", "text in it"),
        lambda d: read_text(write(d / "a.txt", b"a")),
    ),
    Case(
        "a character that training never saw",
        lambda _: Vocabulary("abc \n").encode("ab\nc z"),
        ("'z' at line 2, column 3", "5 of the vocabulary", "Vocabulary(train + validation)"),
        lambda _: Vocabulary("abc \n" + "ab\nc z").encode("ab\nc z"),
    ),
    Case(
        "a vocabulary of nothing",
        lambda _: Vocabulary(""),
        ("no characters", "Give the text"),
        lambda _: Vocabulary("a"),
    ),
    Case(
        "a text too short to keep a part of",
        lambda d: Text(path=str(write(d / "a.txt", b"word " * 20)), context=64).build(),
        ("context 64", "validation 0.1", "10 of its 100 characters", "context=9"),
        lambda d: Text(path=str(write(d / "a.txt", b"word " * 20)), context=9).build(),
    ),
    Case(
        "a data set that can only be streamed",
        lambda _: GrainRows(ELEMENTS.to_iter_dataset()),
        ("rows by index", "IterDataset", "before its .to_iter_dataset()"),
        lambda _: GrainRows(ELEMENTS),
    ),
    Case(
        "a data set that repeats without end",
        lambda _: GrainRows(ELEMENTS.repeat()),
        ("without end", ".repeat()", "Shuffled"),
        lambda _: GrainRows(ELEMENTS),
    ),
    Case(
        "elements that are no dicts",
        lambda _: GrainRows(ELEMENTS)[np.arange(2)],
        ("Element 0 is a ", "not a dict", "dataset.map(lambda x: {'image': x})"),
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"image": x}))[np.arange(2)],
    ),
    Case(
        "batches with a number in them",
        lambda _: shapes(WithNumber(np.float32(0.5))),
        ("`rate` of a batch is one number", "np.full(rows, rate)"),
        lambda _: shapes(WithNumber(np.full(2, np.float32(0.5)))),
    ),
    Case(
        "a tuple without names",
        lambda _: GrainRows(ELEMENTS.map(lambda x: (x, x)))[np.arange(2)],
        ("tuple of 2", "names has 0", 'names=["image", "label"]'),
        lambda _: GrainRows(ELEMENTS.map(lambda x: (x, x)), names=["image", "label"])[np.arange(2)],
    ),
    Case(
        "elements of different shapes",
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"x": np.zeros(1 + x // 2)}))[np.arange(4)],
        ("one shape", "element 2 has {'x': (2,)}", "{'x': (1,)}", "dataset.map(crop_or_pad)"),
        lambda _: GrainRows(
            ELEMENTS.map(lambda x: {"x": np.zeros(1 + x // 2)}).map(lambda e: {"x": e["x"][:1]})
        )[np.arange(4)],
    ),
    Case(
        "an array that only later elements have",
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"x": x} | ({"y": x} if x else {})))[
            np.arange(2)
        ],
        ("one shape", "element 1 has {'x': (), 'y': ()}", "element 0 has {'x': ()}"),
        lambda _: GrainRows(ELEMENTS.map(lambda x: {"x": x, "y": x}))[np.arange(2)],
    ),
    Case(
        "an array that only later batches have",
        lambda _: StackedBatches([{"x": np.zeros(2)}, {"x": np.zeros(2), "y": np.ones(2)}], 2)[0],
        ("step 1 has x, y where step 0 has x", "Give each batch all of them"),
        lambda _: StackedBatches([{"x": np.zeros(2), "y": np.ones(2)}] * 2, 2)[0],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_says_what_is_wrong_and_what_to_type(case: Case, tmp_path: Path):
    with pytest.raises(case.error) as caught:
        case.wrong(tmp_path)
    for part in case.says:
        assert part in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_doing_what_it_says_works(case: Case, tmp_path: Path):
    case.right(tmp_path)  # raises if not


@pytest.mark.parametrize("several", [False, True])
def test_a_path_of_a_config_is_named_by_its_key(several: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    there = write(tmp_path / "plays.txt", b"To be, or not to be\n" * 100)
    typed = lambda path: f"data={{kind: text, path: {f'[{there}, {path}]' if several else path}}}"
    config = lambda path: resolve(CONFIGS / "shakespeare.yaml", [typed(path)]).config
    with pytest.raises(DataError) as caught:
        build_experiment(config(tmp_path / "play.txt"), Unplaced())
    assert str(caught.value).splitlines()[0].endswith(f"Did you mean data.path={there}?")
    build_experiment(config(there), Unplaced())
