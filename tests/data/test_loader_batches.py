"""Loaders of other libraries, their rows, and the names of arrays."""

from collections.abc import Callable, Iterable
from typing import Any

import grain
import numpy as np
import pytest

from jtrain.core.batches import Batches
from jtrain.data import GrainRows, LoaderBatches, MixedBatches, Shuffled
from jtrain.errors import DataError

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
