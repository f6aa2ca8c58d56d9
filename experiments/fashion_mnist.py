"""Classification of clothing: a network of any kind over images of a byte a pixel."""

import dataclasses
from typing import Annotated

import numpy as np
from jaxtyping import Array
from pydantic import Field

import jtrain as jt
from jtrain.data import Augment, FashionMnist, ImageDataset, InOrder, Shuffled
from jtrain.errors import DataError
from jtrain.losses import cross_entropy, soft_cross_entropy
from jtrain.models import CNN, EfficientNetLite, ResNet, ViT, classes
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement


@jt.configclass
class Clothes(FashionMnist):
    """Fashion-MNIST, changed at random where it is trained on."""

    augment: Augment = Augment()
    """How; by default not at all."""
    rows: int = Field(default=0, ge=0)
    """Training rows that are used, drawn by a fixed seed; 0: all."""

    def build(self) -> ImageDataset:
        """Read the images as bytes and their classes.

        Raises:
            DataError: if the files do not exist or are incomplete, or have fewer rows.
        """
        data = super().build()
        count = len(data.train)
        if not self.rows:
            return data
        if self.rows > count:
            raise DataError(f"data.rows={self.rows} rows of {count}. Set data.rows={count}, or 0.")
        places = jt.data.permute(np.arange(count), count, seed=jt.data.SPLIT, epoch=0)
        return data._replace(train=jt.data.Subset(data.train, np.sort(places[: self.rows])))


@jt.configclass
class Config(jt.RunConfig):
    """A classifier of clothes."""

    data: Clothes = Clothes()
    """The images."""
    model: Annotated[
        CNN | ResNet | ViT | EfficientNetLite, jt.Registry("models", jt.Kind, "build")
    ] = CNN()
    """The network; image and classes are those of the data."""

    def build(self, place: Placement) -> jt.Experiment:
        """Mark the loss as coupled if the model has batch norm."""
        data = self.data.build()
        values = dataclasses.replace(self.model, image=data.image, classes=data.classes)
        model = values.build(place)

        @jt.stateful
        def loss(
            params: Params, extra: Extra, batch: Batch, rng: Key | None
        ) -> tuple[jt.Mean, Metrics, Extra]:
            keys, mask = jt.row_keys(rng, batch), batch["mask"]
            logits, extra = model.apply(params, extra, batch["image"], mask=mask, rng=keys)
            if "chances" in batch:  # of images that are mixed
                return *soft_cross_entropy(logits, batch["chances"], batch["mask"]), extra
            return *cross_entropy(logits, batch["label"], batch["mask"]), extra

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            logits, _ = model.apply(params, extra, batch["image"], mask=batch["mask"])
            return classes(logits)

        train = Shuffled(data.train, size=self.batch, seed=self.seed)
        return jt.Experiment(
            init=model.init,
            loss=loss,
            rows_interact="batch" if values.rows_interact == "batch" else "never",
            train=self.data.augment.build(train, classes=data.classes),
            valid=InOrder(data.validation, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            predict=predict,
        )
