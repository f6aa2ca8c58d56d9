"""Losses with one planted fault, and the small problems that they are planted in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from line import height, line, points

from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys

CLASSES = 4


class Planted(NamedTuple):
    """A loss with one fault, and the cause that a check must report."""

    loss: Any
    cause: str
    message: str = ""
    """Words of the explanation."""
    given: Mapping[str, Any] = {}
    """More arguments of `assert_invariant`; `params` and `batch` replace those of the line."""

    def arguments(self) -> dict[str, Any]:
        """Return all arguments of `assert_invariant`."""
        return {"loss": self.loss, "params": line(), "batch": points(8), **self.given}


def errors(params, batch):
    """Return the squared errors of a line: b."""
    return jnp.square(height(params, batch) - batch["y"])


def counted(batch):
    """Return the number of rows that count, as float32."""
    return batch["mask"].sum(dtype=jnp.float32)


def total(params, batch):
    """Return the sum of squared errors over the rows that count."""
    return jnp.where(batch["mask"], errors(params, batch), 0).sum()


def good(params, batch, rng):
    return Mean.of(errors(params, batch), batch["mask"])


def classes(size=8, **leaves):
    """Return points with a label each."""
    draw = np.random.default_rng(1)
    label = draw.integers(0, CLASSES, size).astype(np.int32)
    return {**points(size), "label": label, **leaves}


def linear():
    """Return the parameters of a linear classifier of points."""
    kernel = np.random.default_rng(2).normal(size=(3, CLASSES))
    return {"kernel": jnp.asarray(kernel, jnp.float32)}


def logits(params, batch):
    return batch["x"] @ params["kernel"]  # b c


def nats(params, batch):
    """Return the cross entropy of each row."""
    chances = jax.nn.log_softmax(logits(params, batch))
    return -jnp.take_along_axis(chances, batch["label"][:, None], 1)[:, 0]


def entropy(params, batch, rng):
    return Mean.of(nats(params, batch), batch["mask"])


CLASSIFIER = {"params": linear(), "batch": classes()}


def dropped(params, batch, rng, draw):
    """Return the loss with the inputs that the mask `draw(rng)`, b 3, selects."""
    if rng is None:
        return good(params, batch, None)
    return good(params, batch | {"x": jnp.where(draw(rng), batch["x"], 0)}, rng)


def by_key(keys):
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3,)))(keys)


def dropout(params, batch, rng):
    return dropped(params, batch, rng, lambda rng: by_key(row_keys(rng, batch)))
