"""Data whose arrays have names that every batch has is refused, and not overwritten."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jtrain.data import InOrder, LoaderBatches, MixedBatches, Shuffled
from jtrain.data.batches.stream import Streamed
from jtrain.errors import DataError

IMAGES = {"image": np.ones((4, 8, 8), np.float32), "mask": np.zeros((4, 8, 8), bool)}


class Segmented:
    """Source of images and the masks of a segmentation."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return {name: np.repeat(array[:1], len(indices), 0) for name, array in IMAGES.items()}


class Same:
    """Stream of one item."""

    def next(self) -> int:
        return 0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], /) -> None:
        del state


def loader() -> Iterator[dict[str, np.ndarray]]:
    yield IMAGES


@pytest.mark.parametrize(
    "read",
    [
        lambda: Shuffled(Segmented(), size=4)[0],
        lambda: Shuffled(Segmented(), size=4).read_stacked(0, 2),
        lambda: InOrder(Segmented(), size=4)[0],
        lambda: MixedBatches({"all": (Segmented(), 1)}, size=4)[0],
        lambda: Streamed(Same, lambda item: {n: x[item] for n, x in IMAGES.items()}, size=4)[0],
        lambda: LoaderBatches(loader, size=4)[0],
    ],
    ids=["shuffled", "stacked", "in order", "mixed", "streamed", "loader"],
)
def test_a_mask_of_the_data_is_not_replaced_by_that_of_the_batch(read: Callable[[], Any]):
    with pytest.raises(DataError, match=r"an array called 'mask'.* such as masks"):
        read()
