"""Rows of a torch data set, and the rows or batches of a torch DataLoader."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jtrain.data.batches.loader_batches import LoaderBatches
from jtrain.data.sources.foreign import to_array
from jtrain.errors import DataError


class TorchRows:
    """The rows of a map-style `torch.utils.data.Dataset`, collated by a `collate_fn`.

    A row is a mapping of arrays, a pair (called x and y) or a single array (x).

    Args:
        dataset: a data set with `len` and an item for each index.
        collate: turns a list of items into a batch, like a DataLoader's `collate_fn`.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]):
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return named_arrays(self._collate([self.dataset[i] for i in indices.tolist()]))


def from_loader(loader: Any) -> TorchRows | LoaderBatches:
    """Return the rows that a DataLoader reads, or its batches if it can only be streamed.

    In place of the DataLoader jtrain shuffles, as a function of seed and step, so that a stopped
    run resumes exactly.

    Raises:
        DataError: if the DataLoader has a custom sampler, or streams batches of different sizes.
    """
    if hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__"):
        _check_sampler(loader)
        return TorchRows(loader.dataset, loader.collate_fn)
    if not (loader.batch_size and loader.drop_last):
        raise DataError(
            "this DataLoader streams, and its last batch may be short. Make every batch one size: "
            "DataLoader(dataset, batch_size=32, drop_last=True)."
        )
    return LoaderBatches(lambda: map(named_arrays, loader), size=loader.batch_size)


def named_arrays(batch: Any) -> dict[str, np.ndarray]:
    """Return a batch of tensors as arrays by name: its own names, `x` and `y`, or `x`.

    Raises:
        DataError: if the batch is no mapping, pair or tensor.
    """
    if isinstance(batch, Mapping):
        return {str(name): np.asarray(to_array(array)) for name, array in batch.items()}
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return {"x": np.asarray(to_array(batch[0])), "y": np.asarray(to_array(batch[1]))}
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return {"x": np.asarray(to_array(batch[0]))}
    if hasattr(batch, "shape"):
        return {"x": np.asarray(to_array(batch))}
    found = f"{len(batch)} items" if isinstance(batch, list | tuple) else type(batch).__name__
    raise DataError(
        f"an item of a torch data set is (x, y), one tensor, or a dict of tensors by name, and "
        f'this one has {found}. Return a dict from its __getitem__: {{"x": ..., "y": ...}}.'
    )


def _check_sampler(loader: Any) -> None:
    # A plain BatchSampler has the sampler of the rows; any other draws them itself.
    by_batch = loader.batch_sampler
    is_plain = type(by_batch).__name__ in {"BatchSampler", "NoneType"}
    sampler = type(getattr(by_batch, "sampler", loader.sampler) if is_plain else by_batch).__name__
    if sampler not in {"RandomSampler", "SequentialSampler"}:
        raise DataError(
            f"this DataLoader draws its rows by a {sampler}, and jtrain draws rows itself, each "
            "once an epoch. Give the data set alone, jt.fit(loss, params, loader.dataset), with a "
            "weight a row in the loss where rows count differently."
        )
