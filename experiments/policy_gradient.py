"""Policy gradients on a cart with a pole: rollouts inside the loss, a row an episode."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped
from pydantic import Field

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.models import MLP
from jtrain.types import Batch, Key, LossFn, Metrics, Params, Placement


def moved(state: Float[Array, "b 4"], push: Float[Array, "b"]) -> Float[Array, "b 4"]:
    """Place, speed, angle and its speed after 0.02 s under a force of `push` newtons.

    Source: Barto, Sutton & Anderson 1983, https://doi.org/10.1109/TSMC.1983.6313077, frictionless,
    with the constants of https://gymnasium.farama.org/environments/classic_control/cart_pole/.
    """
    gravity, cart, pole, half, seconds = 9.8, 1.0, 0.1, 0.5, 0.02
    _, speed, angle, turn = state.T
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    pull = (push + pole * half * turn**2 * sin) / (cart + pole)
    angular_acceleration = (gravity * sin - cos * pull) / (
        half * (4 / 3 - pole * cos**2 / (cart + pole))
    )
    gain = pull - pole * half * angular_acceleration * cos / (cart + pole)
    return state + seconds * jnp.stack([speed, gain, turn, angular_acceleration], 1)


def rollout(
    model: jt.Model, params: Params, keys: Shaped[Array, "b"], horizon: int, *, greedy: bool
) -> tuple[Float[Array, "b t 4"], Int[Array, "b t"], Bool[Array, "b t"]]:
    """Play an episode for each key; return observations, actions and whether each was upright."""
    start = jax.vmap(lambda key: jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05))

    def act(carry, t):
        state, alive = carry
        logits = model.apply(params, {}, state)[0][:, :2].astype(jnp.float32)
        draws = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, t), (2,)))(keys)
        action = jnp.argmax(logits if greedy else logits + draws, 1).astype(jnp.int32)
        after = moved(state, jnp.where(action == 1, 10.0, -10.0))
        upright = (abs(after[:, 0]) < 2.4) & (abs(after[:, 2]) < np.deg2rad(12))  # m, radians
        return (after, alive & upright), (state, action, alive)

    first = start(keys), jnp.ones(len(keys), bool)
    _, seen = jax.lax.scan(act, first, jnp.arange(1, horizon + 1))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), seen)


def to_go(rewards: Float[Array, "b t"], discount: float) -> Float[Array, "b t"]:
    """Return the discounted sum of the rewards from each time on."""
    add = lambda later, now: (now + discount * later,) * 2
    return jax.lax.scan(add, jnp.zeros(len(rewards)), rewards.T, reverse=True)[1].T


def reinforce(model: jt.Model, horizon: int, discount: float, entropy: float) -> LossFn:
    """Return the loss of REINFORCE with a learned baseline (Williams 1992, https://doi.org/10.1007/BF00992696)."""

    def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Terms, Metrics]:
        judged = jt.row_keys(jax.random.key(0), {"row": batch["episode"]})  # the same each time
        keys = judged if rng is None else jt.row_keys(rng, batch)
        played = jax.lax.stop_gradient(params), keys, horizon
        state, action, alive = rollout(model, *played, greedy=rng is None)
        outputs = model.apply(params, {}, state.reshape(-1, 4), train=rng is not None)[0]
        outputs = outputs.reshape(*action.shape, 3).astype(jnp.float32)
        chances, value = jax.nn.log_softmax(outputs[..., :2]), outputs[..., 2]
        taken = jnp.take_along_axis(chances, action[..., None], 2)[..., 0]
        returns = (1 - discount) * to_go(alive.astype(jnp.float32), discount)  # in 0 .. 1
        surprise = jax.lax.stop_gradient(returns - value)
        spread = -jnp.sum(jnp.exp(chances) * chances, 2)
        # Rows weigh alike, however long they stay upright: a weight may not depend on parameters.
        by_row = lambda x: jt.Mean.of(jnp.where(alive, x, 0).mean(1), batch["mask"])
        terms = by_row(-taken * surprise - entropy * spread) + 0.5 * by_row((value - returns) ** 2)
        return terms, {"return": jt.Mean.of(alive.sum(1).astype(jnp.float32), batch["mask"])}

    return loss


@jt.configclass
class Episodes:
    """Cart and pole, and how they are trained."""

    horizon: int = Field(default=500, gt=0)
    """Actions until an episode is ended, the pole still upright; 0.02 s each."""


@jt.configclass
class Network:
    """The policy and its baseline in one network: two actions and a value."""

    widths: tuple[int, ...] = (64, 64)
    """Numbers in each hidden layer."""
    discount: float = Field(default=0.99, gt=0, lt=1)
    """What a reward is worth an action later."""
    entropy: float = Field(default=0.01, ge=0)
    """Weight of the entropy that keeps the policy trying, in units of a return in 0 .. 1."""


@jt.configclass
class Config(jt.RunConfig):
    """Keep a pole upright on a cart."""

    data: Episodes = Episodes()
    """The episodes."""
    model: Network = Network()
    """The policy."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build rows without data: an episode is drawn from the key of its row."""
        model = MLP(inputs=4, widths=self.model.widths, classes=3).build(place)
        train, valid = (Arrays(episode=np.arange(n)) for n in (self.batch, 64))
        return jt.Experiment(
            init=model.init,
            loss=reinforce(model, self.data.horizon, self.model.discount, self.model.entropy),
            train=Shuffled(train, size=self.batch, seed=self.seed),
            valid=InOrder(valid, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
        )
