"""One step: what it computes, what it refuses to do, and what it costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_language
from comparison import assert_close, bitwise, distance
from line import line, points, squared, start

from jtrain.core.accumulate import accumulate
from jtrain.core.gradient import LossGradient, make_value_fn
from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step, scan_steps
from jtrain.errors import ConfigError

SGD = optax.sgd(0.1)


@pytest.mark.thorough
def test_is_the_step_of_the_closed_form():
    batch = points(8, hidden=3)
    state, metrics = jax.jit(make_step(squared, SGD))(start(SGD), batch)
    x, y = (batch[name][:5].astype(np.float64) for name in ("x", "y"))
    slope, offset = np.array([0.5, -1, 2]), 0.25
    error = x @ slope + offset - y
    gradient = {"slope": 2 * error @ x / 5, "offset": 2 * error.mean()}
    norm = np.sqrt(gradient["slope"] @ gradient["slope"] + gradient["offset"] ** 2)
    moved = jax.tree.map(lambda before, after: np.float64(before) - after, line(), state.params)
    assert distance(moved, jax.tree.map(lambda leaf: 0.1 * leaf, gradient)) < 1e-6
    numbers = {name: mean.value() for name, mean in metrics.items()}
    assert numbers == pytest.approx(
        {"loss": np.mean(error**2), "grad_norm": norm, "update_norm": 0.1 * norm, "skipped": 0},
        rel=1e-6,
    )
    assert int(state.step) == 1


def test_composes_under_the_users_own_jit_without_row_or_mask():
    whole = points(8)
    bare = {name: whole[name] for name in ("x", "y")}
    got, _ = jax.jit(make_step(squared, SGD, microbatches=2))(start(SGD), bare)
    want, _ = jax.jit(make_step(squared, SGD, microbatches=2))(start(SGD), whole)
    assert distance(got.params, want.params) < 1e-6


@pytest.mark.thorough
def test_gives_the_loss_a_key_of_its_own_each_step_and_none_to_evaluation():
    def loss(params, batch, rng):
        return squared(params, batch, rng), {"draw": Mean(jax.random.uniform(rng), jnp.float32(1))}

    step, state = jax.jit(make_step(loss, SGD)), start(SGD)
    draws = []
    for number in range(2):
        state, metrics = step(state, points())
        draws.append(metrics["draw"].value())
        key = jax.random.fold_in(jax.random.key(3), number)
        assert draws[-1] == pytest.approx(float(jax.random.uniform(key)), rel=1e-6)
    assert draws[0] != draws[1]


def spoilt(batch):
    return batch | {"y": np.where(batch["row"] == 2, np.nan, batch["y"]).astype(np.float32)}


def test_a_gradient_that_is_not_finite_changes_no_bit():
    optimizer = optax.adamw(0.1)
    step = jax.jit(make_step(squared, optimizer, microbatches=2))
    state, _ = step(start(optimizer), points())
    odd = {"slope": jnp.array([-0.0, 0.0, 3e38]), "offset": jnp.array(-0.0)}
    state = dataclasses.replace(state, params=odd)
    after, metrics = step(state, spoilt(points()))
    assert bitwise(after.params, state.params)
    assert bitwise(after.opt_state, state.opt_state)
    assert (int(after.step), int(after.skipped)) == (2, 1)
    assert np.isnan(metrics["loss"].value())
    assert metrics["skipped"].value() == 1
    assert metrics["update_norm"].value() == 0


@pytest.mark.thorough
def test_the_weights_cost_no_forward_pass():
    microbatches = 2
    loss = functools.partial(tiny_language.next_token, data="terms")
    make = lambda: new_state(tiny_language.init_params(jax.random.key(0)), SGD, jax.random.key(1))
    state, batch = jax.eval_shape(make), next(tiny_language.batches("terms", 1))
    step = jax.jit(make_step(loss, SGD, microbatches=microbatches)).lower(state, batch).compile()
    alone = jax.jit(loss).lower(state.params, batch, None).compile()
    # Two layers, each with a product forward and two backward; a second forward would make 8. A
    # loop's body counts once, so half the rows in it are half the operations.
    assert alone.as_text().count(" dot(") == 2
    assert step.as_text().count(" dot(") == 6
    assert flops(step) < 3.3 * flops(alone) / microbatches


def test_the_weights_of_all_microbatches_are_summed_without_a_loop():
    """Devices of a CPU deadlock in a loop's sum over them and in one that depends on no loop."""
    batch = points(8, hidden=3)
    lowered = jax.jit(make_step(squared, SGD, microbatches=4)).lower(start(SGD), batch)
    assert lowered.as_text().count("stablehlo.while") == 1, "that of the gradients"


def flops(program) -> float:
    return program.cost_analysis()["flops"]


@pytest.mark.thorough
def test_the_loss_is_traced_once():
    traced = []

    def counted(params, batch, rng):
        traced.append(1)
        return squared(params, batch, rng)

    step, state = jax.jit(make_step(counted, SGD), donate_argnums=0), start(SGD)
    for _ in range(10):
        state, _ = step(state, points())
    assert len(traced) == 1
    assert int(state.step) == 10


def test_many_steps_in_one_call_are_the_same_steps():
    """To 1e-6: XLA may fuse the body of a loop otherwise than a step on its own."""
    optimizer = optax.adamw(0.1)
    each = [points(seed=n) for n in range(3)]
    stacked = {name: np.stack([batch[name] for batch in each]) for name in each[0]}
    step = make_step(squared, optimizer)
    got, metrics = jax.jit(scan_steps(step))(start(optimizer), stacked)
    want, one = start(optimizer), jax.jit(step)
    for number, batch in enumerate(each):
        want, alone = one(want, batch)
        assert metrics["loss"].value()[number] == pytest.approx(alone["loss"].value(), rel=1e-6)
    assert distance(got.params, want.params) < 1e-6
    assert int(got.step) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("opaque", [True, False])
def test_sam_gets_the_gradient_elsewhere(opaque: bool):
    sam = optax.contrib.sam(SGD, optax.contrib.normalize(), 2, opaque_mode=opaque)
    step, state, batch = (
        jax.jit(make_step(squared, sam, microbatches=2)),
        start(sam),
        points(8, hidden=3),
    )
    real = {name: jnp.asarray(array[:5]) for name, array in batch.items()}
    grad = jax.grad(lambda params, *index: squared(params, real, None).total / 5)
    params, memory = line(), sam.init(line())
    for _ in range(4):
        state, _ = step(state, batch)
        more = {"grad_fn": grad} if opaque else {}
        updates, memory = sam.update(grad(params), memory, params, **more)
        params = optax.apply_updates(params, updates)
    assert distance(state.params, params) < 1e-6


def update_of(**defaults):
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: -factor * u, updates), state

    return functools.partial(update, **defaults)


def with_update(update, init=lambda params: ()):
    return optax.GradientTransformationExtraArgs(init, update)


def first_row(updates, state, params=None):
    return jax.tree.map(lambda u: u.sum(), updates), state


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (with_update(update_of()), r"factor.* is given value, .*functools\.partial\(update, NAME"),
        (optax.contrib.sophia(0.1), r"obj_fn must be provided.*is given value, grad"),
        (with_update(first_row), r"update of slope is \[\], and its gradient is \[3\]"),
    ],
)
def test_an_optimizer_that_needs_more_is_refused(optimizer, says: str):
    with pytest.raises(ConfigError, match=says):
        jax.eval_shape(make_step(squared, optimizer), start(optimizer), points(8, hidden=3))


def test_an_argument_that_is_bound_is_no_longer_missing():
    bound = with_update(update_of(factor=0.1))
    states = [jax.jit(make_step(squared, o))(start(o), points(8))[0] for o in (bound, SGD)]
    assert distance(states[0].params, states[1].params) < 1e-6


@pytest.mark.parametrize(("microbatches", "unroll"), [(1, False), (4, False), (2, True)])
def test_every_row_is_summed_once(microbatches, unroll):
    square = lambda batch: {
        "x": (batch["x"] ** 2).sum(0),
        "rows": len(batch["x"]) + 0 * batch["row"].sum(),
    }
    batch = points(8)
    got = jax.jit(accumulate(square, microbatches, unroll=unroll))(batch)
    assert_close(got["x"], (batch["x"].astype(np.float64) ** 2).sum(0), 1e-6)
    assert got["rows"] == 8


def test_a_slice_takes_every_nth_row_so_that_rows_stay_on_their_device():
    """A slice whose rows are 0, 2, 4, 6 sums to 12, the other to 16."""
    product = lambda batch: jnp.log(batch["row"].sum().astype(jnp.float32))
    got = jax.jit(accumulate(product, 2))(points(8))
    assert float(got) == pytest.approx(np.log(12) + np.log(16))


def test_sixteen_bits_are_summed_in_thirty_two():
    ones = lambda batch: batch["x"].astype(jnp.bfloat16).sum().astype(jnp.bfloat16)
    batch = {"x": jnp.ones(1024)}
    got = jax.jit(accumulate(ones, 512))(batch)
    assert (got.dtype, float(got)) == (jnp.float32, 1024)  # in bfloat16 256 + 1 is 256


@pytest.mark.thorough
def test_the_derivative_of_the_value_is_the_gradient_given_with_it():
    batch = {name: jnp.asarray(x) for name, x in points(8).items()}
    mean = lambda params: squared(params, batch, None).total / 8
    gradient = lambda params: LossGradient(*jax.value_and_grad(mean)(params), {}, ())
    value = make_value_fn(gradient)
    assert float(value(line())) == pytest.approx(float(mean(line())), rel=1e-6)
    got, want = jax.grad(lambda p: 3 * value(p))(line()), jax.grad(mean)(line())
    assert distance(got, jax.tree.map(lambda leaf: 3 * leaf, want)) < 1e-6
