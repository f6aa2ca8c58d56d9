"""The adversaries of experiments/gan.py: one run of both is what two steps take, and they learn."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from comparison import assert_leaves_close
from quick_study import config_of, trained

import jtrain as jt
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "gan.yaml"
SINGLE = ("parallel={kind: single}",)


def study():
    config_of(CONFIG)  # puts the directory of the experiments where modules are found
    from experiments import gan

    return gan


def test_one_step_of_both_is_a_step_of_each_with_the_other_in_extra():
    gan = study()
    optimizers = {"generator": optax.adam(1e-3, b1=0.5), "critic": optax.sgd(1e-2)}
    config = config_of(CONFIG, ["model.widths=[16]", "batch=32"])
    x = config.build(Unplaced())
    values = gan.Networks(widths=(16,), noise=2)
    models = [gan.MLP(inputs=2, widths=(16,), classes=outputs).build() for outputs in (2, 1)]
    losses = dict(zip(optimizers, gan.losses(*models, values), strict=True))
    key, batches = jax.random.key(3), x.train
    params, _ = x.init(key)
    together = optax.partition(optimizers, {name: name for name in optimizers})
    both = jt.new_state(params, together, key)
    alone = {n: jt.new_state(params[n], rule, key) for n, rule in optimizers.items()}

    def with_the_other(name):
        def loss(own, other, batch, rng):
            return losses[name](own, other, batch, rng), {}, other

        return jt.make_step(jt.stateful(loss), optimizers[name])

    @jax.jit
    def step(both, generator, critic, batch):
        after = jt.make_step(x.loss, together)(both, batch)[0]
        of_generator = dataclasses.replace(generator, extra=critic.params)
        of_critic = dataclasses.replace(critic, extra=generator.params)
        generator, _ = with_the_other("generator")(of_generator, batch)
        critic, _ = with_the_other("critic")(of_critic, batch)
        return after, generator, critic

    for number in range(3):
        both, *apart = step(both, *alone.values(), batches[number])
        alone = {n: dataclasses.replace(s, extra=()) for n, s in zip(alone, apart, strict=True)}
    moved = named_leaves(jax.tree.map(lambda a, b: abs(a - b).max(), both.params, params))
    assert moved.pop("critic/layers/1/bias") == 0  # it is the same for both points of a pair
    assert min(moved.values()) > 1e-5
    for name, state in alone.items():
        assert_leaves_close(both.params[name], state.params, 1e-5)


def test_places_are_counted_by_the_points_near_them():
    gan = study()
    near = gan.near(gan.PLACES[[0, 0, 3]] + np.float64([[0.1, 0.1], [0.11, 0.11], [0, 0.1]]))
    assert near == (2, pytest.approx(2 / 3))  # 0.141 and 0.156 are on either side of 3 deviations
    assert gan.near(np.zeros((5, 2))) == (0, 0.0)
    places, share = gan.near(np.asarray(gan.ring(4000, seed=5).arrays["x"]))
    assert places == 8
    assert share == pytest.approx(1 - np.exp(-4.5), abs=0.01)  # of a normal, in three deviations


@pytest.mark.slow
def test_finds_most_places_in_a_few_hundred_steps():
    settings = (*SINGLE, "steps=400", "batch=64", "model.widths=[32,32]", "steps_per_call=100")
    outcome = trained(CONFIG, *settings, "checkpoint.every=0")
    found = re.fullmatch(r"(\d) of 8 places, ([\d.]+)% of the points near one", outcome.sample)
    assert found, outcome.sample
    assert int(found[1]) >= 6
    assert float(found[2]) > 8
