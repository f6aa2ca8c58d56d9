"""A physics-informed network: heat along a rod, learned from its equation and no data."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import Field

import jtrain as jt
from jtrain.data import Arrays, InOrder
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement


class Drawn:
    """`batches[step]`: places `x` and times `t` in 0 .. 1, other ones at each step.

    A batch is a function of seed and step; a process draws all of it and keeps its rows.
    """

    ragged = False

    def __init__(self, size: int, seed: int, mine: slice = slice(None)):
        self.size, self.seed, self.mine = size, seed, mine

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        x, t = np.random.default_rng([self.seed, step]).random((2, self.size), np.float32)
        rows = {"x": x, "t": t, "row": np.arange(self.size, dtype=np.int32)}
        rows["mask"] = np.ones(self.size, bool)
        return {name: array[self.mine] for name, array in rows.items()}

    def shard(self, index: int, count: int) -> "Drawn":
        """Return the same batches, sharded over processes."""
        share = self.size // count
        return Drawn(self.size, self.seed, slice(index * share, (index + 1) * share))


@jt.configclass
class Rod:
    """A rod of length 1 whose ends are held at 0, for a time of 1."""

    conductivity: float = Field(default=0.1, gt=0)
    """How fast heat spreads: u_t = conductivity x u_xx."""
    waves: tuple[int, ...] = (1, 3)
    """Half waves of heat along the rod at the start, each of height 1 / number."""

    def exact(self, x: Float[Array, "*b"], t: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Return the exact solution: half wave n fades by conductivity x (n pi)^2."""
        fades = lambda n: jnp.exp(-self.conductivity * (n * math.pi) ** 2 * t)
        waves = [fades(n) * jnp.sin(n * math.pi * x) / n for n in self.waves]
        return jnp.stack(waves).sum(0)


@jt.configclass
class Network:
    """Linear maps with tanh between them, of place and time."""

    widths: tuple[int, ...] = (32, 32, 32)
    """Numbers in each hidden layer."""
    start: float = Field(default=10.0, ge=0)
    """Weight of the error at time 0, beside the equation's."""
    ends: float = Field(default=10.0, ge=0)
    """Weight of the error at the ends of the rod."""

    def init(self, key: Key) -> Params:
        """Initialize kernels by Glorot & Bengio 2010, biases at zero."""
        sizes = (2, *self.widths, 1)
        pairs = list(zip(jax.random.split(key, len(sizes)), sizes, sizes[1:], strict=False))
        draw = lambda key, i, o: jax.random.normal(key, (i, o)) * math.sqrt(2 / (i + o))
        return [{"kernel": draw(*pair), "bias": jnp.zeros(pair[2])} for pair in pairs]

    def heat(self, params: Params, x: Float[Array, ""], t: Float[Array, ""]) -> Float[Array, ""]:
        """Return the temperature at one place and time."""
        *hidden, last = params
        h = jnp.stack([2 * x - 1, 2 * t - 1])
        for layer in hidden:
            h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
        return (h @ last["kernel"] + last["bias"])[0]


@jt.configclass
class Config(jt.RunConfig):
    """The heat of a rod."""

    data: Rod = Rod()
    """The rod."""
    model: Network = Network()
    """The network."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build rows of a place and a time; only the evaluation uses the solution."""
        rod, network = self.data, self.model

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Terms, Metrics]:
            heat = lambda x, t: network.heat(params, x, t)
            slope = jax.grad(heat, 0)
            leaves = lambda x, t: jax.grad(heat, 1)(x, t) - rod.conductivity * jax.grad(slope)(x, t)
            x, t, nought = batch["x"], batch["t"], jnp.zeros_like(batch["x"])
            mean = lambda error: jt.Mean.of(jnp.square(error), batch["mask"])
            of_rows = lambda f, x, t: jax.vmap(f)(x, t)
            begins = of_rows(heat, x, nought) - rod.exact(x, nought)
            equation = mean(of_rows(leaves, x, t))
            ends = mean(of_rows(heat, nought, t)), mean(of_rows(heat, nought + 1, t))
            terms = equation + network.start * mean(begins) + network.ends * (ends[0] + ends[1])
            exact = rod.exact(x, t)
            error, size = mean(of_rows(heat, x, t) - exact), mean(exact)
            return terms, {"equation": equation, "squared_error": jt.Mean(error.total, size.total)}

        def predict(params: Params, extra: Extra, batch: Batch) -> Float[Array, "b"]:
            return jax.vmap(lambda x, t: network.heat(params, x, t))(batch["x"], batch["t"])

        ticks = np.linspace(0, 1, 64, dtype=np.float32)
        grid = np.stack(np.meshgrid(ticks, ticks)).reshape(2, -1)
        return jt.Experiment(
            init=lambda key: (network.init(key), ()),
            loss=loss,
            train=Drawn(self.batch, self.seed),
            valid=InOrder(Arrays(x=grid[0], t=grid[1]), size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            predict=predict,
        )
