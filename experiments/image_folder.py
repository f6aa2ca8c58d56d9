"""Image classification: a network of any kind over images in folders by class, or of the Hub."""

from typing import Annotated

from pydantic import Field

import jtrain as jt
from experiments import fashion_mnist
from jtrain.data import Augment, HubImages, ImageFolder


@jt.configclass
class Photographs(ImageFolder):
    """Images in folders by class, changed at random where they are trained on."""

    augment: Augment = Augment()
    """How; by default not at all."""


@jt.configclass
class Published(HubImages):
    """Images of a data set on the Hub, changed at random where they are trained on."""

    augment: Augment = Augment()
    """How; by default not at all."""


@jt.configclass
class Config(fashion_mnist.Config):
    """A classifier of images of one's own."""

    data: Annotated[Photographs | Published, Field(discriminator="kind")] = Photographs(  # pyright: ignore[reportIncompatibleVariableOverride]
        folder="images"
    )
    """The images."""
