"""Full batches: all rows, in order, and the same arrays at each step."""

import numpy as np
import pytest

from jtrain.core.batches import Batches
from jtrain.data import Arrays
from jtrain.data.batches.by_step import FullBatches
from jtrain.data.batches.stacked import StackedBatches
from jtrain.errors import DataError


def test_each_batch_is_every_row_and_the_same_arrays():
    batches = FullBatches(Arrays(x=np.arange(6.0), label=np.arange(6)))
    assert isinstance(batches, Batches)
    first, later = batches[0], batches[700]
    assert first["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert first["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert first["mask"].all()
    assert sorted(first) == ["label", "mask", "row", "x"]
    for name, array in first.items():
        assert later[name] is array
        assert not array.flags.writeable, "or a device could not keep it"


def test_calls_of_several_steps_are_one_object_too():
    calls = StackedBatches(FullBatches(Arrays(x=np.arange(6.0))), 3)
    assert calls[0]["x"].shape == (3, 6)
    assert calls[0]["x"] is calls[5]["x"]


def test_a_process_reads_its_rows_only():
    asked = []

    class Source:
        def __len__(self):
            return 6

        def __getitem__(self, indices):
            asked.append(indices.tolist())
            return {"x": np.arange(6)[indices]}

    half = FullBatches(Source()).shard(1, 2)
    assert half[3]["x"].tolist() == half[3]["row"].tolist() == [3, 4, 5]
    assert asked == [[3, 4, 5]]
    assert half.size == 6


def test_no_rows_and_no_step_are_refused():
    class Empty:
        def __len__(self):
            return 0

        def __getitem__(self, indices):
            return {}

    with pytest.raises(DataError, match="has 0 rows"):
        FullBatches(Empty())
    with pytest.raises(IndexError, match="batch -1"):
        FullBatches(Arrays(x=np.arange(3)))[-1]
