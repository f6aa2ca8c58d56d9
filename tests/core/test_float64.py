"""Sums are float64 where their inputs are: means, losses, evaluations and the best of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrain as jt
from jtrain.core.evaluate import evaluate, make_evaluate
from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.models.adapters import mean_of_slices

DRAW = np.random.default_rng(0).random(48)
PARAMS = {"b": np.float64(0)}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def mean(params, batch, rng):
    del rng
    return Mean.of(batch["v"] - params["b"], batch["mask"])


def scalar(params, batch, rng):
    del rng
    return jnp.mean(batch["v"] - params["b"])


@pytest.mark.parametrize("loss", [mean, scalar])
def test_an_evaluation_of_any_size_keeps_its_digits(loss):
    program = jax.jit(make_evaluate(loss))
    for scale in (1e9, 1e200, 1e-60):
        rows = scale * (1 + DRAW)
        found = evaluate(program, (PARAMS, ()), [{"v": half} for half in np.split(rows, 3)])
        assert found["loss"] == pytest.approx(rows.mean(), rel=1e-14)


@pytest.mark.thorough
def test_a_mean_is_as_wide_as_its_values_and_weights():
    single, double, rows = jnp.float32(DRAW), jnp.float64(DRAW), jnp.ones(48, bool)
    assert Mean.of(single, rows).total.dtype == np.float32
    assert Mean.of(single > 0.5, rows).total.dtype == np.float32
    assert Mean.of(jnp.arange(48), rows, single).weight.dtype == np.float32
    assert Mean.of(single, rows, double).weight.dtype == np.float64
    assert Mean.of(jnp.float16(DRAW), rows).total.dtype == np.float32


@pytest.mark.thorough
def test_a_step_has_loss_and_norms_in_float64():
    def loss(params, batch, rng):
        return Mean.of(jnp.square(params["b"] - batch["v"]), batch["mask"])

    optimizer, rows = optax.sgd(0.5), 1e150 * (1 + DRAW)
    step = jax.jit(make_step(loss, optimizer, microbatches=2))
    state, metrics = step(new_state(PARAMS, optimizer, jax.random.key(0)), {"v": rows})
    assert metrics["loss"].value() == pytest.approx(np.square(rows).mean(), rel=1e-14)
    assert metrics["grad_norm"].value() == pytest.approx(2 * rows.mean(), rel=1e-14)
    assert float(state.params["b"]) == pytest.approx(rows.mean(), rel=1e-14)


def test_a_ready_made_loss_keeps_targets_near_a_billion():
    x, model = DRAW[:, None], lambda p, x: 1e9 + x @ p["w"]
    y = (1e9 + x)[:, 0]
    for loss in (jt.regression(model), jt.regression(lambda p, x: model(p, x)[:, None])):
        program = jax.jit(make_evaluate(loss))
        found = evaluate(program, ({"w": np.ones(1)}, ()), [{"x": x, "y": y}])
        assert found["loss"] == found["absolute_error"] == 0


def test_the_state_of_another_librarys_module_keeps_its_digits():
    after = {"a": jnp.asarray(np.full(2, 1e200))}
    new = mean_of_slices({"a": jnp.zeros(2)}, after, jnp.ones(3, bool))
    assert new["a"].total.tolist() == [1e200, 1e200]
