"""Digit recognition, the smallest study: a data set, a network and a loss."""

import dataclasses

from jaxtyping import Array

import jtrain as jt
from jtrain.data import Digits, InOrder, Shuffled
from jtrain.losses import cross_entropy
from jtrain.models import MLP, classes
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement


@jt.configclass
class Config(jt.RunConfig):
    """A classifier of handwritten digits."""

    data: Digits = Digits()
    """The digits."""
    model: MLP = MLP(widths=(512, 256), dropout=0.2)
    """The network."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build the network and the data of the study."""
        data = self.data.build()
        model = dataclasses.replace(self.model, inputs=64, classes=data.classes).build(place)

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            logits, _ = model.apply(params, {}, batch["image"], rng=jt.row_keys(rng, batch))
            return cross_entropy(logits, batch["label"], batch["mask"])

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            return classes(model.apply(params, {}, batch["image"])[0])

        return jt.Experiment(
            init=model.init,
            loss=loss,
            train=Shuffled(data.train, size=self.batch, seed=self.seed),
            valid=InOrder(data.validation, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            predict=predict,
        )
