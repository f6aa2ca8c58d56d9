"""Batches by the step: their order, every row once an epoch, each process its own; in mixtures."""

import itertools
import zlib
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from pydantic import TypeAdapter

from jtrain.core.batches import Batches
from jtrain.data import Arrays, GrainRows, InOrder, LoaderBatches, MixedBatches, Shuffled
from jtrain.data.batches.mixed import Proportions
from jtrain.data.batches.shuffle import permute
from jtrain.data.text.corpora import Mixture
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import DataError


def numbered(rows: int) -> Arrays:
    return Arrays(x=np.arange(rows))


def seen(batches: Shuffled, steps: range) -> list[int]:
    return [int(x) for k in steps for x in batches[k]["x"][batches[k]["mask"]]]


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (3, 10)])
def test_crossing_batches_have_every_row_once_an_epoch(rows: int, size: int):
    batches = Shuffled(numbered(rows), size=size, seed=1)
    stream = seen(batches, range(-(-3 * rows // size)))
    epochs = [stream[e * rows : (e + 1) * rows] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    assert rows < 5 or epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert not batches.ragged


def test_dropping_batches_never_mix_two_epochs():
    batches = Shuffled(numbered(10), size=4, end="drop")
    for epoch in range(20):
        rows = seen(batches, range(2 * epoch, 2 * epoch + 2))
        assert len(set(rows)) == len(rows) == 8
    assert {row for k in range(40) for row in seen(batches, range(k, k + 1))} == set(range(10))
    assert not batches.ragged


def test_padded_batches_have_every_row_once_and_keep_their_shape():
    batches = Shuffled(numbered(10), size=4, end="pad")
    assert batches.ragged
    assert not Shuffled(numbered(12), size=4, end="pad").ragged
    for epoch in range(5):
        steps = range(3 * epoch, 3 * epoch + 3)
        assert sorted(seen(batches, steps)) == list(range(10))
        assert [int(batches[k]["mask"].sum()) for k in steps] == [4, 4, 2]
        for k in steps:
            assert batches[k]["x"].shape == (4,)
            assert set(batches[k]["x"]) <= set(range(10))


@pytest.mark.parametrize("end", ["cross", "drop", "pad"])
def test_knows_the_epoch_of_a_step(end):
    batches = Shuffled(numbered(10), size=4, end=end)
    expected = {"cross": [0, 0, 0, 1, 1, 2], "drop": [0, 0, 1, 1, 2, 2], "pad": [0, 0, 0, 1, 1, 1]}
    assert [batches.epoch_of(k) for k in range(6)] == expected[end]


# Checksums of batches 0 .. 299 and the millionth, from the first code, an epoch at a time.
@pytest.mark.parametrize(
    ("end", "checksum"), [("cross", 0x24B1D276), ("drop", 0xA73EE41C), ("pad", 0x1D98BCF0)]
)
def test_the_order_is_that_of_consecutive_epochs(end: str, checksum: int):
    batches, found = Shuffled(numbered(1438), size=128, seed=5, end=end), 0
    for step in [*range(300), 10**6]:
        found = zlib.crc32(batches[step]["x"].astype("<i8").tobytes(), found)
    assert found == checksum


@pytest.mark.parametrize("end", ["cross", "drop", "pad"])
def test_processes_read_only_their_rows(end):
    count = 3
    asked: list[int] = []

    class Watched(Arrays):
        def __getitem__(self, indices):
            asked.extend(indices.tolist())
            return super().__getitem__(indices)

    whole = Shuffled(numbered(50), size=6, end=end)
    for k in range(30):
        expected = whole[k]
        for index in range(count):
            asked.clear()
            part = Shuffled(Watched(x=np.arange(50)), size=6, end=end).shard(index, count)
            mine = slice(index * 6 // count, (index + 1) * 6 // count)
            for name, array in part[k].items():
                np.testing.assert_array_equal(array, expected[name][mine])
            assert asked == expected["x"][mine].tolist()
            assert (part.size, part.ragged, part.rows) == (6, whole.ragged, 50)


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (8, 1), (9, 4)])
def test_in_order_covers_every_row_once_in_order(rows: int, count: int):
    whole = InOrder(numbered(rows), size=8)
    parts = [whole.shard(index, count) for index in range(count)]
    assert len(whole) == len(parts[0]) == -(-rows // 8)
    assert whole.ragged == (rows % 8 > 0)
    shares = [part[k] for k in range(len(whole)) for part in parts]
    joined = [int(x) for part in shares for x in part["x"][part["mask"]]]
    assert joined == list(range(rows))


IMAGE = np.random.default_rng(0).random((12, 3, 3), np.float32)
LABEL = np.arange(12, dtype=np.int32)


def loaded(open_: Callable[[], Iterable[Any]], size: int) -> LoaderBatches:
    """Adapt a loader as in docs/images.md."""

    def opened():
        for image, label in open_():
            yield {"image": np.asarray(image), "label": np.asarray(label)}

    return LoaderBatches(opened, size=size)


def in_memory() -> Iterable[Any]:
    return ((IMAGE[i : i + 4], LABEL[i : i + 4]) for i in range(0, 12, 4))


def test_a_batch_of_a_loader_is_a_function_of_the_step():
    batches = loaded(in_memory, 4)
    assert isinstance(batches, Batches)
    for step in (0, 1, 2, 3, 7, 2):  # in order, over the end, forward, and back
        rows = np.arange(4) + 4 * (step % 3)
        np.testing.assert_array_equal(batches[step]["image"], IMAGE[rows], strict=True)
        np.testing.assert_array_equal(batches[step]["label"], LABEL[rows], strict=True)


def test_processes_shard_the_batches_of_a_loader():
    whole, parts = loaded(in_memory, 4), [loaded(in_memory, 4).shard(i, 2) for i in range(2)]
    for step in (4, 0):
        for name, array in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([p[step][name] for p in parts]), array)


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([], r"gave no batch. Reopen it"),
        ([{"x": np.arange(4)}, {"x": np.arange(3)}], r"`x` of its batch 1 has 3 rows.*drop_last"),
    ],
)
def test_a_batch_of_another_size_is_refused(batches: list[Any], says: str):
    with pytest.raises(DataError, match=says):
        LoaderBatches(lambda: batches, size=4)[2]


def test_a_mask_of_the_data_is_not_replaced_by_that_of_the_batch():
    images = {"image": np.ones((4, 8, 8), np.float32), "mask": np.zeros((4, 8, 8), bool)}
    source = grain.MapDataset.range(16).map(lambda row: {n: x[0] for n, x in images.items()})
    source = GrainRows(source)
    for batches in (
        Shuffled(source, size=4),
        MixedBatches({"all": (source, 1)}, size=4),
        LoaderBatches(lambda: [images], size=4),
    ):
        with pytest.raises(DataError, match=r"an array called 'mask'.* such as masks"):
            batches[0]


def test_any_weights_are_exact_to_one_row():
    for weights in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.3]):
        assert_shares(weights)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        weights = rng.integers(1, 60, int(rng.integers(2, 9))) ** int(rng.integers(1, 3))
        assert_shares(weights.tolist())


def assert_shares(weights: list[float]) -> None:
    found = Proportions(weights)
    places = np.arange(2 * found.period + 7)
    source, before = found.at(places)
    total = sum(Fraction(repr(float(weight))) for weight in weights)
    for number, weight in enumerate(weights):
        share = Fraction(repr(float(weight))) / total
        counts = np.cumsum(source == number)
        # In integers: |count - share x rows| < 1.
        off = np.abs(counts * share.denominator - share.numerator * (places + 1))
        assert off.max() < share.denominator
        assert before[source == number].tolist() == list(range(counts[-1]))


PARTS = {"a": 10, "b": 7, "c": 3}  # rows


def mixed(size: int = 8, seed: int = 0) -> MixedBatches:
    source = lambda name: Arrays(
        of=np.full(PARTS[name], ord(name)), x=np.arange(PARTS[name], dtype=np.float32)
    )
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    parts = {name: (source(name), weight) for name, weight in weights.items()}
    return MixedBatches(parts, size=size, seed=seed)


def test_each_source_goes_through_its_own_epochs():
    batches = mixed()
    rows = [
        (chr(of), int(x))
        for i in range(100)
        for b in [batches[i]]
        for of, x in zip(b["of"], b["x"], strict=True)
    ]
    for name, length in PARTS.items():
        mine = [x for of, x in rows if of == name]
        epochs = [mine[i : i + length] for i in range(0, len(mine) - length, length)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch in another order"


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    forward, jumping = mixed(), mixed()
    expected = [forward[step]["x"].tolist() for step in range(30)]
    for step in (29, 3, 3, 17):
        assert jumping[step]["x"].tolist() == expected[step]
    assert mixed(seed=1)[0]["x"].tolist() != expected[0]
    whole = np.concatenate([mixed(size=4)[step]["x"] for step in range(60)])
    assert whole.tolist() == np.concatenate(expected).tolist(), "independent of the batch size"


def test_the_order_of_a_mixture_is_pinned():
    a, b = Arrays(x=np.arange(97)), Arrays(x=np.arange(1000, 1310))
    batches, found = MixedBatches({"a": (a, 0.7), "b": (b, 0.3)}, size=64, seed=2), 0
    for step in [*range(600), 10**6]:
        found = zlib.crc32(batches[step]["x"].astype("<i8").tobytes(), found)
    assert found == 0x7B2BDAF2


def test_each_batch_has_the_configured_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    parts, step = {}, 10**6
    for name, text, weight in (("verse", "rose ", 0.7), ("prose", "and so it goes. ", 0.3)):
        Path(f"{name}.txt").write_text(text * 60, encoding="utf-8")
        prepare(f"{name}.txt", name, tokenizing=ByteTokens())
        parts[name] = {"path": name, "weight": weight}
    asked = {"kind": "mixture", "parts": parts, "context": 4}
    corpus = TypeAdapter(Mixture).validate_python(asked).build()
    batches = corpus.shuffled(size=10, seed=0)
    rows = [corpus.vocabulary.decode(row) for row in batches[step]["tokens"]]
    assert sum(row in "rose " * 3 for row in rows) == 7
    halves = [batches.shard(index, 2)[step]["tokens"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), batches[step]["tokens"])


GOLDEN_10 = [3, 5, 6, 2, 4, 0, 7, 9, 8, 1]
GOLDEN_LARGE = [274860752950, 924774190002, 429075405545, 958695470582, 200993238311, 228648995806]


def order(rows: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(rows), rows, seed=seed, epoch=epoch)


def sigmas(counts: np.ndarray, freedom: int) -> float:
    """Return the standard deviations of a chi-square of equal expectations above its mean."""
    expected = counts.mean()
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_is_a_permutation():
    pairs = [(0, 0), (0, 1), (-3, 0), (2**70, 10**9)]
    for rows, (seed, epoch) in itertools.product((1, 2, 5, 64, 65, 4097), pairs):
        np.testing.assert_array_equal(np.sort(order(rows, seed=seed, epoch=epoch)), np.arange(rows))


def test_stays_the_same_on_any_machine_and_with_any_numpy():
    assert order(10).tolist() == GOLDEN_10
    places = np.array([0, 1, 2, 3, 4_000_000_000, 999_999_999_999])
    assert permute(places, 10**12, seed=42, epoch=7).tolist() == GOLDEN_LARGE


def test_places_of_many_epochs_have_the_rows_of_each_epoch():
    rng = np.random.default_rng(0)
    for rows in (1, 6, 97, 1438):
        places, epochs = rng.integers(0, rows, (2, 40)), rng.integers(0, 10**9, (2, 40))
        found = permute(places, rows, seed=3, epoch=epochs)
        for index, place in np.ndenumerate(places):
            assert found[index] == order(rows, seed=3, epoch=int(epochs[index]))[place]


@pytest.mark.thorough
def test_every_order_of_four_rows_is_equally_likely():
    orders = {p: 0 for p in itertools.permutations(range(4))}
    for epoch in range(2400):
        orders[tuple(order(4, epoch=epoch).tolist())] += 1
    assert sigmas(np.array(list(orders.values())), 23) < 4


@pytest.mark.thorough
def test_every_row_is_equally_likely_at_every_place():
    rows = 10
    counts = np.zeros((rows, rows))
    for epoch in range(2000):
        counts[np.arange(rows), order(rows, epoch=epoch)] += 1
    assert sigmas(counts, (rows - 1) ** 2) < 4
