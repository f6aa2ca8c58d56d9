"""Subject of the trials: a small network with dropout, Adam, two evaluations and a best step."""

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.configclass import configclass
from jtrain.config.top import CheckpointConfig, EvaluateConfig, LogConfig
from jtrain.core.mean import Mean
from jtrain.core.placement import Placement
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.optim import AdamW
from jtrain.train.experiment import Experiment, RunConfig

STEPS, INPUTS, HIDDEN, CLASSES, DROPPED = 15, 16, 32, 8, 0.1
KEPT = 2  # newest checkpoints that are retained, besides the best
DIMS = {"first": ("inputs", "hidden"), "bias": ("hidden",), "second": ("hidden", "classes")}


@configclass
class Config(RunConfig):
    """Classification of points into eight sectors."""

    def build(self, place: Placement) -> Experiment:
        """Build the experiment."""

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[Mean, Metrics]:
            hidden = jax.nn.relu(batch["x"] @ params["first"] + params["bias"][None])
            hidden = place.constrain(hidden, "batch", "hidden")
            if rng is not None:
                draw = lambda key: jax.random.bernoulli(key, 1 - DROPPED, (HIDDEN,))
                hidden = hidden * jax.vmap(draw)(row_keys(rng, batch)) / (1 - DROPPED)
            logits = place.constrain(hidden @ params["second"], "batch", "classes")
            return cross_entropy(logits, batch["label"], batch["mask"])

        return Experiment(
            init=_init,
            loss=loss,
            dims=DIMS,
            train=Shuffled(_points(0, 100), size=self.batch, seed=self.seed),
            valid=InOrder(_points(1, 20), size=self.batch),
            optimizer=self.optimizer,
        )


def config(each: int = 1, **changed: object) -> Config:
    """Return its config, with 1 or 3 steps in a call; two checkpoints and the best are retained."""
    given = {
        "name": "hurt",
        "steps": STEPS,
        "batch": 8,
        "optimizer": AdamW(lr=1e-2),
        "steps_per_call": each,
        "evaluate": EvaluateConfig(every=4 if each == 1 else 6),
        "checkpoint": CheckpointConfig(every=3, keep=KEPT, best="loss"),
        "log": LogConfig(every=1),
        **changed,
    }
    return Config(experiment="chaos", **given)


def _init(key: Key) -> tuple[Params, Extra]:
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "bias": jnp.zeros(HIDDEN),
        "second": jax.random.normal(second, (HIDDEN, CLASSES)) / HIDDEN**0.5,
    }, ()


def _points(seed: int, count: int) -> Arrays:
    x = np.random.default_rng(seed).standard_normal((count, INPUTS)).astype(np.float32)
    sector = (x[:, 0] > 0) + 2 * (x[:, 1] > 0) + 4 * (x[:, 2] > 0)
    return Arrays(x=x, label=sector.astype(np.int32))
