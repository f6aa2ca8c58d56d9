"""The config of Fashion-MNIST, its classes, and the location of its files."""

from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.image_dataset import FILES, ImageDataset, read_dataset
from jtrain.data.sources.known_sets import debian_package, find_set

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
