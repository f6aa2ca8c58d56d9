"""Images of a data set that is named as on the Hugging Face Hub (`jtrain[hf,images]`)."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from jtrain.config.configclass import configclass
from jtrain.data.batches.row_cache import cache_rows
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.images.image_folder import ResizedImages
from jtrain.data.sources.arrays import hold_out
from jtrain.data.sources.foreign import check_columns, load_hub_set
from jtrain.data.sources.source import Source, import_optional
from jtrain.errors import DataError


@configclass
class HubImages(ResizedImages):
    """Images with a class each of a data set on the Hugging Face Hub, decoded on access."""

    kind: Literal["hf"] = "hf"
    name: str
    """A data set as the package `datasets` names it: `org/set`, or a folder with files."""
    config: str = ""
    """The configuration of the data set; empty: its default one."""
    split: str = "train"
    """The split to train on, or a part of it: `train[:10%]`."""
    revision: str = ""
    """A branch, a tag or a commit; empty: the main branch."""
    image: str = "image"
    """The column of the images."""
    label: str = "label"
    """The column of the classes."""
    validation: float | str = 0.1
    """The share of the rows, drawn by their number, that is held out for validation; or the name of
    another split."""

    def build(self) -> ImageDataset:
        """Download the data set, unless it is in the cache of `datasets`.

        Raises:
            DataError: if there is no such data set, split or column, or a column holds no images or
                no classes.
        """
        rows, classes = self._rows(self.split, 0)
        if isinstance(self.validation, str):
            train, held_out = rows, self._rows(self.validation, classes)[0]
        else:
            train, held_out = hold_out(rows, self.validation)
        return ImageDataset(train, held_out, held_out, self.size.shape, classes)

    def _rows(self, split: str, classes: int) -> tuple[Source, int]:
        """Return the rows of a split, and the number of classes: `classes` unless that is 0."""
        found, where = load_hub_set(self.name, self.config, split, self.revision), self.name
        check_columns([self.image, self.label], found.column_names, f"{where} ({split})")
        hub = import_optional("datasets", "hf", "A data set of the Hugging Face Hub")
        # Files without the metadata of `datasets` have a struct of bytes and path.
        is_image = lambda kind: (
            isinstance(kind, hub.Image) or (isinstance(kind, dict) and "bytes" in kind)
        )
        if not is_image(found.features[self.image]):
            images = [name for name, kind in found.features.items() if is_image(kind)]
            raise DataError(
                f"Column {self.image!r} of {where} holds {found.features[self.image]}, and images "
                f"are needed. Set data.image to one of {images or 'another data set'}."
            )
        labels = found.with_format("numpy", columns=[self.label])[:][self.label]
        named = getattr(found.features[self.label], "num_classes", None)
        whole = labels.ndim == 1 and labels.dtype.kind in "iu"
        classes = classes or named or (int(labels.max()) + 1 if whole else 0)
        if not whole or labels.min() < 0 or labels.max() >= classes:
            raise DataError(
                f"Column {self.label!r} of {where} ({split}) should hold classes 0 .. "
                f"{classes - 1 if whole else 'n'}, and holds "
                f"{f'{labels.min()} .. {labels.max()}' if whole else found.features[self.label]}. "
                f"Set data.label to a column of classes, or data.split to a split that has them."
            )
        encoded = found.select_columns([self.image]).cast_column(
            self.image, hub.Image(decode=False)
        )
        rows = HubImageRows(
            encoded, self.image, labels.astype(np.int32), self.size, f"{where} ({split})"
        )
        return cache_rows(rows, self.cache), classes


class HubImageRows:
    """`image` (uint8, b h w c) and `label` (int32, b) of a `datasets.Dataset` of encoded images.

    Raises:
        DataError: on access, if an image cannot be decoded; see `decode_image`.
    """

    def __init__(self, dataset: Any, column: str, label: np.ndarray, size: ImageSize, where: str):
        self._images, self._column, self._label = dataset.with_format(None), column, label
        self._size, self._where = size, where

    def __len__(self) -> int:
        return len(self._label)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        image = np.empty((len(indices), *self._size.shape), np.uint8)
        for i, file in enumerate(self._images[indices][self._column]):
            found: Any = file or {"bytes": b""}  # a null is no image
            name = f"image {indices[i]} of {self._where}"
            if found["bytes"] is None:  # a file on this disk
                image[i] = decode_image(Path(found["path"]), self._size)
            else:
                image[i] = decode_image(name, self._size, found["bytes"])
        return {"image": image, "label": self._label[indices]}
