"""Methods that the configs of image classifiers share."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jtrain.models.pixels import Pixels
from jtrain.models.pretrained.config_values import Published


class ImageClassifier(Published):
    """Base of the configs of image classifiers; each declares these fields with its defaults."""

    image: tuple[int, int, int]
    pixels: Pixels

    stem_side = 3
    """Height and width of the windows of the first convolution."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what the network gets."""
        return self.pixels.shape(self.image)

    def for_leaves(self, shape: Callable[[str], tuple[int, ...]]) -> "ImageClassifier":
        """Return the config with the sizes of trained parameters, whose shapes `shape` returns.

        Height and width, on which no parameter depends, are those of ImageNet if they are 0.

        Args:
            shape: by name; the shape of a kernel may also be (inputs, outputs).
        """
        channels = math.prod(shape("stem/kernel")[:-1]) // self.stem_side**2
        image = self.image if 0 not in self.image else (224, 224, channels)
        config: Any = self
        return dataclasses.replace(config, image=image, classes=shape("head/bias")[0])
