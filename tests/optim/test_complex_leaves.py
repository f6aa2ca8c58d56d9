"""Complex parameters: the steps of their real and imaginary parts, as in PyTorch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import distance

from jtrain.core.mean import Mean
from jtrain.core.precision.loss_scale import LossScale
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lamb,
    Muon,
    ParamGroup,
    ScheduleFree,
    evaluation_params,
)
from jtrain.optim.transformations import by_parts

GOAL = np.complex64(1 + 2j)
DRAW = np.random.default_rng(0)
COMPLEX = lambda *shape: (DRAW.normal(size=shape) + 1j * DRAW.normal(size=shape)).astype("c8")
X, Y = COMPLEX(8, 3), DRAW.normal(size=8).astype(np.float32)
START = {"w": COMPLEX(3, 2), "b": np.zeros(2, np.float32)}
SCALE = LossScale.start(2.0**10, growth=100, minimum=1.0)
OTHERS = (
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip=0.5),
    AdamW(lr=0.1, ema=0.9, clip_value=0.3),
    Lamb(lr=0.1),
    Adafactor(lr=0.1, factor_from=2, momentum=0.5),
    Muon(lr=0.1),
    ScheduleFree(lr=0.1),
)


def split(params):
    return params | {"w": {"re": params["w"].real, "im": params["w"].imag}}


def joined(params):
    return params | {"w": jax.lax.complex(params["w"]["re"], params["w"]["im"])}


def filtered(params, batch, rng):
    """Compute a real loss of a filter with complex weights."""
    del rng
    power = jnp.square(jnp.abs(batch["x"] @ params["w"])) + params["b"][None]
    return Mean.of(jnp.square(power.sum(-1) - batch["y"]), batch["mask"])


def of_parts(params, batch, rng):
    return filtered(joined(params), batch, rng)


def steps(loss, params, optimizer, count=3, scale=None, **options):
    options_of_state = {} if scale is None else {"scale": scale}
    params = jax.tree.map(jnp.asarray, params)
    state = new_state(params, optimizer, jax.random.key(0), **options_of_state)
    step = jax.jit(make_step(loss, optimizer, **options))
    for _ in range(count):
        state, metrics = step(state, {"x": X, "y": Y})
    return state, {name: mean.value() for name, mean in metrics.items()}


@pytest.mark.thorough
def test_gradient_descent_is_that_of_the_closed_form():
    def loss(params, batch, rng):
        return Mean.of(jnp.square(jnp.abs(params["z"] - GOAL)) + 0 * batch["y"], batch["mask"])

    state, numbers = steps(loss, {"z": np.complex64(0)}, optax.sgd(0.1), 20)
    assert complex(state.params["z"]) == pytest.approx(GOAL * (1 - 0.8**20), rel=1e-5)
    assert numbers["grad_norm"] == pytest.approx(2 * abs(GOAL) * 0.8**19, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"scale": SCALE}])
def test_a_step_is_that_of_real_and_imaginary_part(options):
    optimizer = SGD(lr=1e-3, clip=1.0).build(10)
    got, numbers = steps(filtered, START, optimizer, **options)
    want, same = steps(of_parts, split(START), optimizer, **options)
    assert distance(split(got.params), want.params) < 1e-6
    assert numbers == pytest.approx(same, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Adam(lr=0.1, weight_decay=0.1, groups=(ParamGroup(match="b", freeze=True),)),
        *(pytest.param(config, marks=pytest.mark.thorough) for config in OTHERS),
    ],
    ids=lambda config: config.kind,
)
def test_every_optimizer_moves_both_parts_as_leaves_of_their_own(config):
    optimizer, ends = config.build(10), []
    for start in (START, split(START)):
        params = jax.tree.map(jnp.asarray, start)
        state = new_state(params, optimizer, jax.random.key(0))
        for _ in range(2):
            grads = jax.tree.map(lambda p: 0.3 * p, state.params)
            updates, after = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            state = dataclasses.replace(state, params=params, opt_state=after)
        ends.append((state.params, evaluation_params(optimizer, state)))
    (got, also), want = ends
    assert got["w"].dtype == np.complex64
    assert distance((split(got), split(also)), want) < 1e-5


def test_real_parameters_have_the_state_and_the_program_of_the_rule():
    real, rule = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, optax.scale_by_adam()
    trace = lambda rule: str(jax.make_jaxpr(rule.update)(real, rule.init(real), real))
    assert trace(by_parts(rule)) == trace(rule)
