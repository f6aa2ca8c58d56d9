"""Batches by the step: every row once an epoch, each process its own rows; also of loaders."""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import grain
import numpy as np
import pytest

from experiments.mnist1d import FullBatches
from jtrain.core.batches import Batches
from jtrain.data import Arrays, GrainRows, InOrder, LoaderBatches, MixedBatches, Shuffled
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


def test_a_batch_depends_on_the_seed_and_the_step_alone():
    rows = numbered(1000)
    forwards = Shuffled(rows, size=32, seed=7)
    backwards = Shuffled(rows, size=32, seed=7)
    expected = [forwards[k]["x"] for k in range(100)]
    for k in reversed(range(100)):
        np.testing.assert_array_equal(backwards[k]["x"], expected[k])
    assert not np.array_equal(Shuffled(rows, size=32, seed=8)[0]["x"], expected[0])


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
    joined = [
        int(x) for k in range(len(whole)) for part in parts for x in part[k]["x"][part[k]["mask"]]
    ]
    assert joined == list(range(rows))


def test_each_batch_is_every_row_and_the_same_arrays():
    batches = FullBatches(Arrays(x=np.arange(6.0), label=np.arange(6)))
    first, later = batches[0], batches[700]
    assert first["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert first["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert first["mask"].all()
    assert sorted(first) == ["label", "mask", "row", "x"]
    for name, array in first.items():
        assert later[name] is array
        assert not array.flags.writeable, "or a device could not keep it"


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
