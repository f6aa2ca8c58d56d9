"""The network of experiments/heat.py: its equation is that of heat, and it learns the solution."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from quick_study import config_of, trained

from jtrain.core.batches import Batches
from jtrain.core.placement import Unplaced

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "heat.yaml"
SINGLE = ("parallel={kind: single}",)


def study():
    config_of(CONFIG)  # puts the directory of the experiments where modules are found
    from experiments import heat

    return heat


def test_the_solution_is_what_heat_does_step_by_step():
    rod, cells = study().Rod(), 50
    x = np.linspace(0, 1, cells + 1)
    heat, step = np.sin(np.pi * x) + np.sin(3 * np.pi * x) / 3, 1e-3
    for _ in range(400):  # Euler's steps of the discretised equation
        heat[1:-1] += step * rod.conductivity * np.diff(heat, 2) * cells**2
    exact = rod.exact(jnp.asarray(x, jnp.float32), jnp.full(cells + 1, 0.4))
    assert_close(exact, heat, 3e-3)
    assert exact.max() > 0.5


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


def test_points_follow_from_seed_and_step_and_processes_share_them():
    batches = study().Drawn(8, seed=1)
    assert isinstance(batches, Batches)
    again, other = study().Drawn(8, seed=1), study().Drawn(8, seed=2)
    assert (batches[5]["x"] == again[5]["x"]).all()
    assert not (batches[5]["x"] == batches[6]["x"]).any()
    assert not (batches[5]["x"] == other[5]["x"]).any()
    parts = [batches.shard(index, 2)[5] for index in (0, 1)]
    for name, array in batches[5].items():
        assert (np.concatenate([part[name] for part in parts]) == array).all()


def test_a_few_hundred_steps_bring_it_near_the_solution():
    settings = ("steps=300", "steps_per_call=100", "batch=64", "model.widths=[16, 16]")
    outcome = trained(CONFIG, *SINGLE, *settings, "evaluate.batch=512")
    final = outcome.results[300]
    assert final["rows"] == 64 * 64
    assert np.sqrt(final["squared_error"]) < 0.5  # 1 for a network that gives 0


def test_its_values_say_what_the_rod_does():
    rod = dataclasses.replace(study().Rod(), waves=(2,), conductivity=0.5)
    later = rod.exact(jnp.float32([0.25]), jnp.float32([0.1]))
    assert_close(later, [np.exp(-0.5 * (2 * np.pi) ** 2 * 0.1) / 2], 1e-5)
