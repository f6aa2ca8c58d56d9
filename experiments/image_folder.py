"""Image classification: a network of any kind over JPEG and PNG files in folders by class."""

import jtrain as jt
from experiments import fashion_mnist
from jtrain.data import Augment, ImageFolder


@jt.configclass
class Photographs(ImageFolder):
    """Images in folders by class, changed at random where they are trained on."""

    augment: Augment = Augment()
    """How; by default not at all."""


@jt.configclass
class Config(fashion_mnist.Config):
    """A classifier of images of one's own."""

    data: Photographs = Photographs(folder="images")  # pyright: ignore[reportIncompatibleVariableOverride]
    """The images."""
