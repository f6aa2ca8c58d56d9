"""The values of augmentation."""

from typing import Any

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.augmented import Augmentation, Augmented


@configclass
class Augment:
    """Random changes of the images that are trained on; by default none."""

    flip: float = Field(default=0.0, ge=0, le=1)
    """The chance that left and right are exchanged: 0.5, where a mirror image is of the class."""
    crop: int = Field(default=0, ge=0)
    """Black pixels laid around an image before one of its size is cut out at random: 4 is usual for
    32 x 32."""
    zoom: float = Field(default=0.0, ge=0, le=1)
    """The smallest share of an image's area that is cut out at random, 3:4 to 4:3 in shape, and
    brought to the whole size: 0.08 is usual for photographs; 0: nothing is cut out."""
    mixup: float = Field(default=0.0, ge=0, le=1)
    """The alpha of mixup: an image keeps a share drawn from Beta(alpha, alpha), the rest is another
    image; 0 mixes nothing, 0.2 is usual. The loss takes `chances` in place of `label`."""
    cutmix: float = Field(default=0.0, ge=0, le=1)
    """The alpha of cutmix: a box of another image is laid over; 0 lays none, 1 is usual. The loss
    takes `chances` in place of `label`."""

    @property
    def mixes(self) -> bool:
        """Whether batches have `chances`."""
        return bool(self.mixup or self.cutmix)

    def build(self, batches: Any, *, classes: int) -> Any:
        """The batches of `Shuffled`, changed; themselves where there is nothing to do."""
        changes = Augmentation(self.flip, self.crop, self.mixup, self.cutmix, self.zoom)
        return Augmented(batches, changes, classes=classes) if any(changes) else batches
