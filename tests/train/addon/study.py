"""An experiment whose data and model other packages may add."""

from typing import Annotated, Literal

import jax.numpy as jnp

import jtrain as jt


@jt.configclass
class Noise:
    kind: Literal["noise"] = "noise"


@jt.configclass
class Constant:
    kind: Literal["constant"] = "constant"


@jt.configclass
class Config(jt.RunConfig):
    data: Annotated[Noise | Constant, jt.Registry("data", jt.Kind)]
    model: Annotated[Noise | Constant, jt.Registry("models", jt.Kind)]

    def build(self, place) -> jt.Experiment:
        params, predict = self.model.build()

        def loss(params, batch, rng):
            squares = (predict(params, batch["x"]) - batch["y"]) ** 2
            return jt.Mean(jnp.sum(squares * batch["mask"]), jnp.sum(batch["mask"])), {}

        first = {name: jnp.float32(value) for name, value in params.items()}
        train = jt.data.Shuffled(self.data.build(), size=self.batch, seed=self.seed)
        return jt.Experiment(init=(first, ()), loss=loss, train=train, optimizer=self.optimizer)
