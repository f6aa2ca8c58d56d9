"""The studies of heat and of a cart with a pole: their equations, and that they learn."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from quick_study import config_of, trained

from jtrain.core.placement import Unplaced
from jtrain.train.hooks.log import read_results

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "heat.yaml"
SINGLE = ("parallel={kind: single}",)


def study():
    config_of(CONFIG)  # puts the directory of the experiments where modules are found
    from experiments import heat

    return heat


def test_the_equation_is_the_networks_by_differences():
    heat = study()
    config = config_of(CONFIG, ["model.widths=[8, 8]", "batch=16"])
    x = config.build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    rows = x.train[3]
    _, metrics = jax.jit(x.loss)(params, rows, None)
    wide = jax.tree.map(np.float64, params)

    def at(place, time):  # the network once more, in float64
        h = np.stack([2 * place - 1, 2 * time - 1], -1)
        for layer in wide[:-1]:
            h = np.tanh(h @ layer["kernel"] + layer["bias"])
        return (h @ wide[-1]["kernel"] + wide[-1]["bias"])[:, 0]

    place, time, d = np.float64(rows["x"]), np.float64(rows["t"]), 1e-4
    by_time = (at(place, time + d) - at(place, time - d)) / (2 * d)
    bent = (at(place + d, time) - 2 * at(place, time) + at(place - d, time)) / d**2
    wanted = np.square(by_time - heat.Rod().conductivity * bent).mean()
    assert_close(metrics["equation"].value(), wanted, 1e-3)


def test_a_few_hundred_steps_bring_it_near_the_solution():
    settings = ("steps=300", "steps_per_call=100", "batch=64", "model.widths=[16, 16]")
    outcome = trained(CONFIG, *SINGLE, *settings, "evaluate.batch=512")
    final = outcome.results[300]
    assert final["rows"] == 64 * 64
    assert np.sqrt(final["squared_error"]) < 0.5  # 1 for a network that gives 0


CART = Path(__file__).parents[2] / "configs" / "policy_gradient.yaml"


def cart():
    config_of(CART)  # puts the directory of the experiments where modules are found
    from experiments import policy_gradient

    return policy_gradient


def accelerations(angle: float, turn: float, force: float) -> np.ndarray:
    """Return the motion of cart and pole from Lagrange's equations (rod of length 1), float64."""
    mass, rod, half, gravity = 1.0, 0.1, 0.5, 9.8
    inertia = np.array(
        [
            [mass + rod, rod * half * np.cos(angle)],
            [rod * half * np.cos(angle), rod * half**2 * 4 / 3],
        ]
    )
    forces = [force + rod * half * turn**2 * np.sin(angle), rod * gravity * half * np.sin(angle)]
    return np.linalg.solve(inertia, forces)


def test_the_cart_moves_as_lagrange_says():
    draw = np.random.default_rng(0)
    states = draw.uniform(-1, 1, size=(50, 4)).astype(np.float32)
    pushes = draw.choice([-10.0, 10.0], 50).astype(np.float32)
    after = cart().moved(jnp.asarray(states), jnp.asarray(pushes))
    for state, push, found in zip(states, pushes, np.asarray(after), strict=True):
        gain, angular = accelerations(state[2], state[3], push)
        rates = np.array([state[1], gain, state[3], angular])
        assert_close(found, state + 0.02 * rates, 1e-5)


def test_the_pole_stays_up_for_150_actions_after_40_updates():
    settings = (*SINGLE, "steps=40", "seed=3", "steps_per_call=10", "evaluate.every=0")
    outcome = trained(CART, *settings, "checkpoint.every=0", "log.every=1")
    returns = [row["return"] for row in read_results(outcome.directory.metrics, "").values()]
    assert np.mean(returns[:3]) < 50
    assert np.mean(returns[-5:]) > 150
    assert outcome.results[40]["return"] > 150
