"""Images of one's own, as JPEG and PNG files in a folder for each class."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.row_cache import cached
from jtrain.data.images.decode import MOST_PIXELS, PIXELS, ImageSize
from jtrain.data.images.image_classes import find_images
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.images.image_files import ImageFiles
from jtrain.data.sources.records import Damaged
from jtrain.data.sources.source import Source
from jtrain.data.sources.subset import keep_back
from jtrain.errors import DataError

VALIDATION, TEST = ("validation", "valid", "val"), ("test",)


@configclass
class ImageFolder:
    """JPEG and PNG files by class: FOLDER/CLASS/..., or FOLDER/train/CLASS/... and FOLDER/val/....

    With a folder `train`, what is judged by lies in `validation`, `valid` or `val`, and the test in
    `test`; where one of these is not there, the other stands for both.
    """

    kind: Literal["image_folder"] = "image_folder"
    folder: str
    """Where the classes' folders lie, or `train` and the others; relative to where you are."""
    height: int = Field(default=224, gt=0)
    """Pixels from top to bottom that every image is brought to."""
    width: int = Field(default=224, gt=0)
    """Pixels from left to right."""
    channels: Literal[1, 3] = 3
    """1: grey; 3: colours."""
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image of another shape fits: what sticks out is cut off evenly, what is missing is
    black, or the image is squashed."""
    pixels: int = Field(default=PIXELS, gt=0, le=MOST_PIXELS)
    """Pixels above which a file is refused before it is decoded, for a small one can fill the
    memory."""
    damaged: Damaged = "stop"
    """What becomes of a file that cannot be decoded: the run stops, or the next image is taken in
    its place and the log says so."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share that is kept to judge by, where there is no folder for that."""
    cache: str = ""
    """Where decoded images are kept: `memory`; or a folder, which later runs use too; empty:
    nowhere."""

    def build(self) -> ImageDataset:
        """Images as bytes and the number of their class, in the order of the classes' names.

        Raises:
            DataError: a folder without classes, a class without images, a link that leads out, or
                a cache for which there is no room.
        """
        root = Path(self.folder)
        parts = {part: root / part for part in ("train", *VALIDATION, *TEST)}
        there = {part: folder for part, folder in parts.items() if folder.is_dir()}
        if "train" not in there:
            rows, classes = self._rows(root, ())
            train, kept = keep_back(rows, self.validation)
            return self._labelled(train, kept, kept, classes)
        train, classes = self._rows(there["train"], ())
        judged = [
            next((there[p] for p in names if p in there), None) for names in (VALIDATION, TEST)
        ]
        if judged == [None, None]:
            raise DataError(
                f"{root} has a folder train and none to judge by. Add {root / 'val'} with images "
                f"by class, or set data.folder={root / 'train'}, of which data.validation is kept."
            )
        read = {folder: self._rows(folder, classes)[0] for folder in judged if folder}
        kept, test = (read[folder] if folder else None for folder in judged)
        kept, test = kept or test, test or kept
        assert kept is not None, "one of the two folders is there"
        assert test is not None, "one of the two folders is there"
        return self._labelled(train, kept, test, classes)

    def _rows(self, root: Path, classes: tuple[str, ...]) -> tuple[Source, tuple[str, ...]]:
        found = find_images(root, classes)
        size = ImageSize(
            height=self.height,
            width=self.width,
            channels=self.channels,
            fit=self.fit,
            pixels=self.pixels,
        )
        files = ImageFiles(root, found.paths, found.label, size=size, damaged=self.damaged)
        return cached(files, self.cache), found.classes

    def _labelled(
        self, train: Source, kept: Source, test: Source, classes: tuple[str, ...]
    ) -> ImageDataset:
        shape = self.height, self.width, self.channels
        return ImageDataset(train, kept, test, shape, len(classes))
