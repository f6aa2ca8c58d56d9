"""Two towers that match upper and lower halves of digits: a loss with coupled rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

import jtrain as jt
from jtrain.data import Digits, InOrder, Shuffled
from jtrain.losses import contrastive
from jtrain.models import MLP
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement


@jt.configclass
class Towers:
    """A network for either half; what they give is compared by its direction."""

    widths: tuple[int, ...] = (128,)
    """Numbers in each hidden layer of a tower."""
    outputs: int = Field(default=32, gt=0)
    """Numbers that a half becomes."""
    temperature: float = Field(default=0.07, gt=0)
    """What likenesses are divided by at first; it is learned."""


@jt.configclass
class Config(jt.RunConfig):
    """Halves of digits find each other among all rows of a batch."""

    data: Digits = Digits()
    """The digits."""
    model: Towers = Towers()
    """The towers."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build a loss that couples rows: sharded over any devices, never split in microbatches."""
        data, values = self.data.build(), self.model
        tower = MLP(inputs=32, widths=values.widths, classes=values.outputs).build(place)

        def init(key: Key) -> tuple[Params, Extra]:
            upper, lower = (tower.init(k)[0] for k in jax.random.split(key))
            return {
                "upper": upper,
                "lower": lower,
                "log_scale": -jnp.log(jnp.float32(values.temperature)),
            }, ()

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            halves = {"upper": batch["image"][:, :4], "lower": batch["image"][:, 4:]}
            keys = jt.row_keys(rng, batch)
            embed = lambda half: tower.apply(params[half], {}, halves[half], rng=keys)[0]
            return contrastive(embed("upper"), embed("lower"), params["log_scale"], batch["mask"])

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            halves = {"upper": batch["image"][:, :4], "lower": batch["image"][:, 4:]}
            return {half: tower.apply(params[half], {}, halves[half])[0] for half in halves}

        return jt.Experiment(
            init=init,
            loss=loss,
            rows_interact="batch",
            train=Shuffled(data.train, size=self.batch, seed=self.seed),
            valid=InOrder(data.validation, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            predict=predict,
        )
