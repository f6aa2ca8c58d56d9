"""The configs of image sets in idx files: Fashion-MNIST, and folders of your own."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.image_dataset import FILES, ImageDataset, read_dataset
from jtrain.data.sources.known_sets import debian_package, find_set
from jtrain.data.sources.remote_files import fetch_folder
from jtrain.errors import DataError
from jtrain.io.object_store import is_address


@configclass
class IdxImages:
    """A folder of four idx files named as MNIST's, plain or `.gz`."""

    kind: Literal["idx"] = "idx"
    folder: str
    """The folder of `train-images-idx3-ubyte` and the others; relative to the working folder."""
    classes: int = Field(gt=1)
    """Number of classes; labels are 0 .. classes-1."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The share of the training rows held out for validation; 0 validates on the test."""

    def build(self) -> ImageDataset:
        """Read the images as bytes and their classes.

        Raises:
            DataError: if a file does not exist or is incomplete, or a label is out of range.
        """
        folder = fetch_folder(self.folder) if is_address(self.folder) else Path(self.folder)
        paths = [_plain_or_packed(folder, name) for name in FILES]
        return read_dataset(paths, classes=self.classes, validation=self.validation)


def _plain_or_packed(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder} (working folder: {Path.cwd()}). Set data.folder= to one "
            f"that holds {', '.join(FILES)}, plain or .gz."
        )
    contents = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise DataError(
        f"{folder} lacks {name}, plain or .gz; it holds {contents}. Rename the intended file, or "
        f"set data.folder= to a folder that has {', '.join(FILES)}."
    )


CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@configclass
class FashionMnist:
    """70,000 grey images of clothes, 28 x 28, in 10 classes: 60,000 for training, 10,000 for test.

    Source: Xiao, Rasul and Vollgraf 2017, https://arxiv.org/abs/1708.07747; MIT licence.
    """

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The share of the 60,000 that is held out for validation; 0 validates on the test set."""

    def build(self) -> ImageDataset:
        """Read the images as bytes and their classes.

        Raises:
            DataError: if the files do not exist or are incomplete.
        """
        package = debian_package("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist")
        paths = find_set("fashion-mnist", FILES, package)
        return read_dataset(paths, classes=len(CLASSES), validation=self.validation)
