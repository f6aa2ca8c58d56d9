"""Fashion-MNIST and other sets in the files of MNIST."""

from typing import Literal

from pydantic import Field

from jtrain.data.find import Package, debian, find_set
from jtrain.data.labelled import Labelled, read_labelled
from jtrain.data.subset import keep_back
from jtrain.values import values

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
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


@values
class FashionMnist:
    """70,000 grey pictures of clothes, 28 x 28, in 10 classes: 60,000 to train on, 10,000 to test.

    Source: Xiao, Rasul and Vollgraf 2017, https://arxiv.org/abs/1708.07747; MIT licence.
    """

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The share of the 60,000 that is kept to judge by; 0 trains on all and judges by the test."""

    def build(self) -> Labelled:
        """The pictures as bytes and their classes.

        Raises:
            DataError: if the files are not there or not whole.
        """
        package = debian("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist")
        return in_mnist_files("fashion-mnist", package, classes=10, validation=self.validation)


def in_mnist_files(name: str, package: Package, *, classes: int, validation: float) -> Labelled:
    """A set in four files named as those of MNIST."""
    paths = find_set(name, FILES, package)
    train = read_labelled(*paths[:2], classes=classes)
    test = read_labelled(*paths[2:], classes=classes)
    kept = test
    if validation:
        train, kept = keep_back(train, validation)
    height, width, channels = test.arrays["image"].shape[1:]
    return Labelled(train, kept, test, (height, width, channels), classes)
