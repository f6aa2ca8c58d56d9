"""Weights may have either sign (advantages, importance weights): a mean is total / weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import strategy
from line import height, line, points, start

import jtrain as jt
from jtrain.core.evaluate import evaluate, make_evaluate
from jtrain.core.loss import combine, stateful
from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.data import Arrays, InOrder
from jtrain.testing import build_case
from jtrain.testing.sums import Sums

# They sum to -3; those of the even rows to -5.25, those of the odd ones to 2.25.
SIGNED = np.array([-2, 1, -1.5, 0.5, -1, 0.25, -0.75, 0.5], np.float32)
SGD = optax.sgd(1.0)


def batch(weights=SIGNED):
    return points(len(weights)) | {"advantage": np.float32(weights)}


def loss(params, batch, rng):
    error = jnp.square(height(params, batch) - batch["y"])
    weighed = Mean.of(error, batch["mask"], batch["advantage"])
    return weighed + 0.5 * Mean.of(height(params, batch), batch["mask"]), {"weighed": weighed}


@functools.cache
def closed_form() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient in float64."""
    x, y, w = (batch()[name].astype(np.float64) for name in ("x", "y", "advantage"))
    guess = x @ [0.5, -1.0, 2.0] + 0.25
    slope = 2 * w * (guess - y) / w.sum() + 0.5 / len(y)  # of the loss in the guess, by row
    value = (w * (guess - y) ** 2).sum() / w.sum() + 0.5 * guess.mean()
    return float(value), {"slope": slope @ x, "offset": slope.sum()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("place", "microbatches"),
    [
        (("single", 1), 1), (("single", 1), 4), (("fsdp", 8), 1), (("mirrored shard_map", 2), 2),
        (("mirrored pmap", 4), 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_is_that_of_the_closed_form_however_it_is_split(place, microbatches):
    where = strategy(*place)
    state, placed = start(SGD, where), where.place(batch())
    step = make_step(loss, SGD, microbatches=microbatches, psum=where.psum)
    state, metrics = where.compile(step, state, placed, returns_state=True)(state, placed)
    value, gradient = closed_form()
    assert metrics["loss"].value() == pytest.approx(value, rel=1e-6)
    taken = jax.tree.map(lambda before, after: before - np.asarray(after), line(), state.params)
    assert distance(taken, gradient) < 1e-6
    assert metrics["weighed"].weight == -3
    assert int(state.skipped) == 0


@pytest.mark.thorough
def test_an_evaluation_is_that_of_the_whole_set_though_its_batches_have_either_sign():
    size = 3
    names = ("x", "y", "advantage")
    rows = InOrder(Arrays(**{name: batch()[name] for name in names}), size=size)
    program = jax.jit(make_evaluate(loss, ragged=rows.ragged))
    got = evaluate(program, (line(), ()), [rows[i] for i in range(len(rows))])
    assert got["loss"] == pytest.approx(closed_form()[0], rel=1e-6)
    assert jt.evaluate(loss, line(), rows, parallel="single") == pytest.approx(got, rel=1e-6)


@pytest.mark.slow
def test_a_check_takes_it_for_the_one_result_that_it_is():
    report = jt.testing.assert_invariant(loss, line(), batch(), strategies={})
    assert report.ok
    of = build_case(loss, line(), batch(), optimizer=SGD)
    got = Sums(case=of).add([of.batch])
    value, gradient = closed_form()
    assert got.loss == pytest.approx(value, rel=1e-6)
    assert distance(got.gradient, gradient) < 1e-6


@pytest.mark.thorough
def test_state_is_the_weighted_mean_too():
    @stateful
    def carried(params, extra, batch, rng):
        seen = Mean.of(batch["y"], batch["mask"], batch["advantage"])
        return loss(params, batch, rng)[0], {}, {"seen": seen}

    state = start(SGD, extra={"seen": jnp.float32(7)})
    state, _ = jax.jit(make_step(carried, SGD, microbatches=2))(state, batch())
    y, w = batch()["y"].astype(np.float64), SIGNED.astype(np.float64)
    mean = y * w / w.sum()
    assert_close(state.extra["seen"], mean.sum(), 1e-6, terms=np.abs(mean).sum())


def test_a_weight_of_exactly_zero_adds_nothing():
    even = np.tile(np.float32([0.5, -0.5]), 4)
    value, metrics = jax.jit(loss)(line(), batch(even), None)
    assert metrics["weighed"].weight == 0
    state, told = jax.jit(make_step(loss, SGD, microbatches=2))(start(SGD), batch(even))
    guess = height(line(), batch()).mean()
    assert told["loss"].value() == pytest.approx(0.5 * float(guess), rel=1e-6)
    assert int(state.skipped) == 0
    for nought in (0.0, -0.0):
        assert combine(1.0 * Mean(jnp.float32(3), jnp.float32(0)), [jnp.float32(nought)]) == 0
    assert value.value() == pytest.approx(0.5 * float(guess), rel=1e-6)


@pytest.mark.thorough
def test_a_weight_that_is_not_finite_is_not_taken_for_zero():
    broken = batch(np.where(np.arange(8) == 3, np.nan, SIGNED))
    state, metrics = jax.jit(make_step(loss, SGD))(start(SGD), broken)
    assert np.isnan(metrics["loss"].value())
    assert int(state.skipped) == 1
    got = evaluate(jax.jit(make_evaluate(loss)), (line(), ()), [broken])
    assert np.isnan(got["loss"])


def test_a_sum_that_cancels_is_exact_relative_to_what_is_summed():
    """The mean is 1e-4 of its values, so its own relative difference may be 1e4 times as large."""
    values = np.random.default_rng(0).normal(size=4096)
    rows = {"x": (values - values.mean() + 1e-4).astype(np.float32)}
    exact, size = rows["x"].astype(np.float64).mean(), np.abs(rows["x"]).mean()
    state = new_state({"w": jnp.float32(1)}, SGD, jax.random.key(0))
    mean = lambda params, batch, rng: Mean.of(params["w"] * batch["x"], batch["mask"])
    for microbatches in (1, 4):
        metrics = jax.jit(make_step(mean, SGD, microbatches=microbatches))(state, rows)[1]
        assert abs(metrics["loss"].value() - exact) <= 1e-6 * size
