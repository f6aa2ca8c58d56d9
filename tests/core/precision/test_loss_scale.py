import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.core.precision.cast import compute_in
from jtrain.core.precision.loss_scale import LossScale
from jtrain.core.state import new_state
from jtrain.core.step import make_step

START = 2.0**15


def scale(factor=START, growth=2000, minimum=1.0):
    return LossScale.start(factor, growth=growth, minimum=minimum)


@pytest.mark.thorough
def test_it_doubles_after_so_many_good_steps_in_a_row():
    here = scale(growth=3)
    factors = []
    for finite in (True, True, False, True, True, True, True):
        here = here.after(jnp.bool_(finite))
        factors.append(float(here.factor) / START)
    assert factors == [1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_it_halves_down_to_its_minimum_and_grows_up_to_what_float32_holds():
    low = scale(4.0, minimum=2.0)
    for _ in range(3):
        low = low.after(jnp.bool_(False))
    assert float(low.factor) == 2.0
    high = scale(2.0**127, growth=1).after(jnp.bool_(True))
    assert float(high.factor) == 2.0**127


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_leaves_it_as_it_was():
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_step(compute_in(line, jnp.float16), optimizer))
    before, _ = step(state_of(optimizer, scale=scale(64.0, growth=3)), batch())
    spoilt = batch() | {"y": np.full(8, np.nan, np.float32)}
    after, metrics = step(before, spoilt)
    assert (metrics["skipped"].value(), metrics["loss_scale"].value()) == (1, 64)
    assert np.isnan(metrics["loss"].value())
    assert (float(after.scale.factor), int(after.scale.good)) == (64, 1)
    for _ in range(2):
        after, _ = step(after, batch())
    assert float(after.scale.factor) == 128


@pytest.mark.thorough
def test_the_loss_is_told_as_it_is_though_it_overflows_scaled():
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_step(line, optimizer))
    state, metrics = step(state_of(optimizer, scale=scale(2.0**127)), batch())
    _, plain = step(state_of(optimizer), batch())
    assert metrics["loss"].value() == plain["loss"].value()
    assert float(state.scale.factor) == 2.0**126


def line(params, batch, rng):
    """Squared error of a line, in the type of its parameters."""
    guess = batch["x"].astype(params["w"].dtype) @ params["w"]
    error = guess.astype(jnp.float32) - batch["y"]
    return jt.Mean.of(jnp.square(error) * batch["size"], batch["mask"])


def batch(size=1.0):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8, 4)).astype(np.float32)
    y = x @ np.float32([1, -2, 0.5, 3])
    return {"x": x, "y": y, "size": np.full(8, size, np.float32)}


def state_of(optimizer, **scaling):
    params = {"w": jnp.zeros(4)}
    return new_state(params, optimizer, jax.random.key(0), **scaling)


@pytest.mark.thorough
def test_gradients_too_small_for_float16_survive_by_it():
    tiny, optimizer = batch(size=1e-8), optax.sgd(1e6)
    exact, _ = jax.jit(make_step(line, optimizer))(state_of(optimizer), tiny)
    step = jax.jit(make_step(compute_in(line, jnp.float16), optimizer))
    lost, _ = step(state_of(optimizer), tiny)
    kept, metrics = step(state_of(optimizer, scale=scale()), tiny)
    np.testing.assert_array_equal(lost.params["w"], 0)  # all of them are below 6e-8
    assert_close(kept.params["w"], exact.params["w"], 2e-3)  # 11 bits
    assert metrics["loss_scale"].value() == START


@pytest.mark.thorough
def test_a_step_that_overflows_changes_nothing_but_the_scale():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    optimizer = optax.adam(schedule)
    step = jax.jit(make_step(compute_in(line, jnp.float16), optimizer))
    before, _ = step(state_of(optimizer, scale=scale(1024.0)), batch())
    after, metrics = step(before, batch(size=1e6))  # 1024 x 1e6 x 2 x error is beyond 65,504
    jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)  # the schedule's
    np.testing.assert_array_equal(before.params["w"], after.params["w"])
    assert metrics["skipped"].value() == 1
    assert float(after.scale.factor) == 512
    assert int(after.step) == 2
    assert np.isfinite(metrics["loss"].value())  # it is the gradient that overflowed


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_scale_changes_no_result_that_float32_holds(microbatches):
    optimizer = optax.adamw(1e-2)
    step = jax.jit(make_step(line, optimizer, microbatches=microbatches))
    plain, scaled = state_of(optimizer), state_of(optimizer, scale=scale())
    for _ in range(5):
        plain, told = step(plain, batch())
        scaled, also = step(scaled, batch())
    np.testing.assert_array_equal(plain.params["w"], scaled.params["w"])  # a power of two
    for name in ("loss", "grad_norm", "update_norm"):
        assert told[name].value() == also[name].value()
