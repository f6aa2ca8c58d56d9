"""The config of JPEG and PNG files in one folder a class."""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.write_paths import WrittenPath
from jtrain.data.batches.row_cache import cache_rows
from jtrain.data.images.decode import MOST_PIXELS, PIXELS, ImageSize
from jtrain.data.images.image_classes import find_images
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.images.image_files import ImageFiles
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.records import Damaged
from jtrain.data.sources.source import Source
from jtrain.data.sources.subset import hold_out
from jtrain.errors import DataError

VALIDATION, TEST = ("validation", "valid", "val"), ("test",)


@configclass
class ImageFolder:
    """JPEG and PNG files by class: FOLDER/CLASS/..., or FOLDER/train/CLASS/... and FOLDER/val/....

    Beside a folder `train`, the validation images are in `validation`, `valid` or `val`, and the
    test images in `test`; if one of these is missing, the other is used for both.
    """

    kind: Literal["image_folder"] = "image_folder"
    folder: str
    """The folder of the classes, or of `train` and the others; relative to the working folder."""
    height: int = Field(default=224, gt=0)
    """Height in pixels of all images after resizing."""
    width: int = Field(default=224, gt=0)
    """Width in pixels."""
    channels: Literal[1, 3] = 3
    """1: grey; 3: colours."""
    fit: Literal["crop", "pad", "squash"] = "crop"
    """Fit of an image of another shape: cut off the edges evenly (crop), add black edges (pad), or
    change the aspect ratio (squash)."""
    pixels: int = Field(default=PIXELS, gt=0, le=MOST_PIXELS)
    """Pixels above which a file is rejected before it is decoded, as a small file can fill the
    memory."""
    damaged: Damaged = "stop"
    """Handling of a file that cannot be decoded: stop the run, or skip the file, log it, and use
    the next image in its place."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share that is held out for validation, if there is no folder for it."""
    cache: WrittenPath = ""
    """Cache of the resized images: `memory`; or a folder, which later runs use too; empty: none.
    With a cache `augment.zoom` cuts its windows from the resized images, and not from the files."""

    def build(self) -> ImageDataset:
        """List the images, decoded on access, and number their classes by the order of their names.

        Raises:
            DataError: a folder without classes, a class without images, a link that leads out, or
                a cache for which there is no room.
        """
        root = Path(self.folder)
        folders = {part: root / part for part in ("train", *VALIDATION, *TEST)}
        existing = {part: folder for part, folder in folders.items() if folder.is_dir()}
        if "train" not in existing:
            rows, classes = self._rows(root, (), self.validation)
            train, held_out = hold_out(rows, self.validation)
            return self._dataset(train, held_out, held_out, classes)
        train, classes = self._rows(existing["train"], ())
        evaluation = [
            next((existing[p] for p in names if p in existing), None)
            for names in (VALIDATION, TEST)
        ]
        if evaluation == [None, None]:
            raise DataError(
                f"{root} has a folder train and none to validate on. Add {root / 'val'} with "
                f"images by class, or set data.folder={root / 'train'}, of which data.validation "
                f"is held out."
            )
        read = {folder: self._rows(folder, classes)[0] for folder in evaluation if folder}
        held_out, test = (read[folder] if folder else None for folder in evaluation)
        held_out, test = held_out or test, test or held_out
        assert held_out is not None, "one of the two folders exists"
        assert test is not None, "one of the two folders exists"
        return self._dataset(train, held_out, test, classes)

    def _rows(
        self, root: Path, classes: tuple[str, ...], validation: float = 0.0
    ) -> tuple[Source, tuple[str, ...]]:
        """Return the images of a folder, of which a share is then held out, and the classes."""
        found = find_images(root, classes)
        size = ImageSize(
            height=self.height,
            width=self.width,
            channels=self.channels,
            fit=self.fit,
            pixels=self.pixels,
        )
        held_out = np.zeros(len(found.paths), bool)
        if validation:
            held_out[hold_out(Arrays(label=found.label), validation)[1].indices] = True
        how = {"size": size, "damaged": self.damaged, "held_out": held_out}
        files = ImageFiles(root, found.paths, found.label, **how)
        return cache_rows(files, self.cache), found.classes

    def _dataset(
        self, train: Source, validation: Source, test: Source, classes: tuple[str, ...]
    ) -> ImageDataset:
        shape = self.height, self.width, self.channels
        return ImageDataset(train, validation, test, shape, len(classes))
