"""A generative adversarial network on a ring of Gaussians: two networks, each its optimizer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from pydantic import Field

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.models import MLP
from jtrain.optim import Adam, Optimizer
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement

PLACES = np.array([[np.cos(angle), np.sin(angle)] for angle in np.arange(8) * np.pi / 4])  # 8 2
DEVIATION = 0.05  # of the points about their place


def ring(rows: int, seed: int) -> Arrays:
    """Return points `x` around eight centers on a circle."""
    draw = np.random.default_rng(seed)
    return Arrays(x=np.float32(draw.normal(PLACES[draw.integers(8, size=rows)], DEVIATION)))


def near(points: Float[np.ndarray, "rows 2"]) -> tuple[int, float]:
    """Count the centers with points within three deviations, and the share of such points."""
    # As Srivastava et al. 2017 judge, https://arxiv.org/abs/1705.07761.
    close = np.linalg.norm(points[:, None] - PLACES[None], axis=2) < 3 * DEVIATION
    return int(close.any(0).sum()), float(close.any(1).mean())


@jt.configclass
class Networks:
    """A generator of points and a critic of them."""

    noise: int = Field(default=2, gt=0)
    """Numbers that a point is made from."""
    widths: tuple[int, ...] = (128, 128)
    """Numbers in each hidden layer of either."""
    penalty: float = Field(default=0.1, ge=0)
    """Weight of the critic's squared slope, at real points and at made ones."""
    critic: Optimizer = Adam(lr=2e-3)
    """How the critic is updated; `optimizer` is the generator's."""


def made(generator: jt.Model, params: Params, keys: Key, noise: int) -> Float[Array, "b 2"]:
    """Return a point for each key."""
    drawn = jax.vmap(lambda key: jax.random.normal(key, (noise,)))(keys)
    return generator.apply(params, {}, drawn, train=True)[0].astype(jnp.float32)


def losses(generator: jt.Model, critic: jt.Model, values: Networks) -> tuple[Callable, Callable]:
    """Return the losses of generator and critic, each `(own, other, batch, rng) -> Terms`.

    A real point is compared with the made one of its row, and the critic is held back by its slope
    at both: Huang et al. 2024, https://arxiv.org/abs/2501.05441. Rows do not meet.
    """

    def score(params: Params, x: Float[Array, "b 2"]) -> Float[Array, "b"]:
        return critic.apply(params, {}, x, train=True)[0][:, 0].astype(jnp.float32)

    def fake(params: Params, batch: Batch, rng: Key | None) -> Float[Array, "b 2"]:
        keys = jt.row_keys(jax.random.key(0) if rng is None else rng, batch)
        return made(generator, params, keys, values.noise)

    def of_generator(own, other, batch, rng):
        behind = jax.nn.softplus(score(other, batch["x"]) - score(other, fake(own, batch, rng)))
        return 1.0 * jt.Mean.of(behind, batch["mask"])

    def of_critic(own, other, batch, rng):
        pair = batch["x"], fake(other, batch, rng)
        behind = jax.nn.softplus(score(own, pair[1]) - score(own, pair[0]))
        slopes = [jax.grad(lambda x: score(own, x).sum())(x) for x in pair]
        steep = jt.Mean.of(jnp.sum(jnp.square(jnp.stack(slopes)), (0, 2)), batch["mask"])
        return jt.Mean.of(behind, batch["mask"]) + values.penalty / 2 * steep

    return of_generator, of_critic


@jt.configclass
class Config(jt.RunConfig):
    """Points like those of a ring."""

    model: Networks = Networks()
    """The networks, and the critic's optimizer."""

    def build(self, place: Placement) -> jt.Experiment:
        """Update both networks at once, each against the other before its update."""
        noise, widths = self.model.noise, self.model.widths
        generator = MLP(inputs=noise, widths=widths, classes=2).build(place)
        critic = MLP(inputs=2, widths=widths, classes=1).build(place)
        of_generator, of_critic = losses(generator, critic, self.model)

        def init(key: Key) -> tuple[Params, Extra]:
            one, other = jax.random.split(key)
            return {"generator": generator.init(one)[0], "critic": critic.init(other)[0]}, {}

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Terms, Metrics]:
            g, c = params["generator"], params["critic"]
            fooling = of_generator(g, jax.lax.stop_gradient(c), batch, rng)
            judging = of_critic(c, jax.lax.stop_gradient(g), batch, rng)
            return fooling + judging, {"generator": fooling.means[0], "critic": judging.means[0]}

        def sample(params: Params, extra: Extra, key: Key) -> str:
            points = made(generator, params["generator"], jax.random.split(key, 2000), noise)
            return "{} of 8 places, {:.1%} of the points near one".format(*near(np.asarray(points)))

        rules = self.optimizer.build(self.steps), self.model.critic.build(self.steps)
        return jt.Experiment(
            init=init,
            loss=loss,
            train=Shuffled(ring(10000, seed=0), size=self.batch, seed=self.seed),
            valid=InOrder(ring(1024, seed=1), size=self.evaluate.batch or self.batch),
            optimizer=optax.partition(dict(enumerate(rules)), {"generator": 0, "critic": 1}),
            sample=sample,
        )
