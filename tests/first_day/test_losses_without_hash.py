"""Losses that have no hash: objects of plain dataclasses, and of modules of equinox."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt

X = np.ones((8, 1), np.float32)


@dataclasses.dataclass
class Target:
    """A loss with arrays of its own."""

    value: np.ndarray

    def __call__(self, params, batch, rng):
        del rng
        return jt.Mean.of((params["w"] - self.value) ** 2 * batch["x"][:, 0], batch["mask"])


class Carried(Target):
    def __call__(self, params, extra, batch, rng):
        return super().__call__(params, batch, rng), {}, extra


@pytest.mark.parametrize("loss", [Target(np.float32(3)), jt.stateful(Carried(np.float32(3)))])
def test_trains(loss):
    with pytest.raises(TypeError, match="unhashable"):
        hash(loss)
    start, data = {"w": jnp.zeros(())}, {"x": X}
    result = jt.fit(loss, start, data, "sgd", lr=0.25, steps=2, batch=8, quiet=True)
    assert float(result.params["w"]) == 3 * (1 - 0.5**2)
