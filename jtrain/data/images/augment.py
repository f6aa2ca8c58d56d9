"""The config of augmentation."""

from typing import Any

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.augmented import Augmentation, Augmented


@configclass
class Augment:
    """Random changes of the training images; by default none."""

    flip: float = Field(default=0.0, ge=0, le=1)
    """The chance of a horizontal flip: 0.5, if a mirror image belongs to the same class."""
    crop: int = Field(default=0, ge=0)
    """Black pixels of padding around an image before a random crop of the old size: 4 is usual for
    32 x 32."""
    zoom: float = Field(default=0.0, ge=0, le=1)
    """The smallest share of an image's area in a random resized crop, 3:4 to 4:3 in shape: 0.08 is
    usual for photographs; 0: no such crop."""
    mixup: float = Field(default=0.0, ge=0, le=1)
    """The alpha of mixup: the share of an image is drawn from Beta(alpha, alpha), the rest is
    another image; 0 mixes nothing, 0.2 is usual. The loss takes `chances` in place of `label`."""
    cutmix: float = Field(default=0.0, ge=0, le=1)
    """The alpha of cutmix: a box of another image is pasted over an image; 0 pastes none, 1 is
    usual. The loss takes `chances` in place of `label`."""

    @property
    def mixes(self) -> bool:
        """True if batches have `chances`."""
        return bool(self.mixup or self.cutmix)

    def build(self, batches: Any, *, classes: int) -> Any:
        """Return the batches of `Shuffled`, augmented; unchanged if there is nothing to do."""
        changes = Augmentation(self.flip, self.crop, self.mixup, self.cutmix, self.zoom)
        return Augmented(batches, changes, classes=classes) if any(changes) else batches
