"""Half precision: copies of the parameters, split anyhow, and the scale of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from layouts import strategy

import jtrain as jt
from jtrain.config.precision import BF16, F16, F32
from jtrain.core.loss import normalize_loss
from jtrain.core.loss_checks import check_product_precision, product_types
from jtrain.core.precision.cast import compute_in
from jtrain.core.precision.loss_scale import LossScale
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import LossError

WEIGHTS = {"up": (6, 16), "down": (16, 3)}


def init():
    draw = np.random.default_rng(0)
    return {n: jnp.asarray(0.3 * draw.normal(size=s), jnp.float32) for n, s in WEIGHTS.items()}


def batch(rows=8):
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(rows, 6)), draw.normal(size=(rows, 3))
    row, mask = np.arange(rows, dtype=np.int32), np.ones(rows, bool)
    return {"x": np.float32(x), "y": np.float32(y), "row": row, "mask": mask}


def two_layers(params, batch, rng):
    hidden = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"])
    error = (hidden @ params["down"]).astype(jnp.float32) - batch["y"]
    return jt.Mean.of(jnp.square(error).sum(-1), batch["mask"])


def uncast(params, batch, rng):
    error = batch["x"] @ params["up"] @ params["down"] - batch["y"]
    return jt.Mean.of(jnp.square(error).sum(-1), batch["mask"])


def walked(loss, precision, *, strategy=None, microbatches=1, steps=3, inside=False):
    """`inside`: the parameters are cast in the loss, and so differentiated in float32."""
    optimizer = optax.sgd(0.05)
    compute = None if inside else precision.compute
    loss = compute_in(loss, precision.compute) if inside else loss
    state = new_state(init(), optimizer, jax.random.key(0), scale=precision.scale())
    if strategy is None:
        step, data = make_step(loss, optimizer, microbatches=microbatches, compute=compute), batch()
        step = jax.jit(step)
    else:
        how = {"microbatches": microbatches, "psum": strategy.psum, "compute": compute}
        step = make_step(loss, optimizer, **how)
        data = strategy.place(batch())
        state = jax.device_put(state, strategy.shardings(state))
        step = strategy.compile(step, state, data, returns_state=True)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, data)
        losses.append(metrics["loss"].value())
    return jax.device_get(state.params), np.array(losses)


@pytest.mark.thorough
@pytest.mark.parametrize(("precision", "bits"), [(BF16(), 8), (F16(), 11)])
def test_the_loss_is_that_of_float32_to_the_bits_of_the_type(precision, bits):
    # Each of the 6 + 16 products and sums of a row rounds by at most half a unit; independent
    # roundings add like their root.
    tolerance = 2.0**-bits * np.sqrt(6 + 16)
    _, exact = walked(two_layers, F32())
    params, losses = walked(two_layers, precision)
    assert_close(losses, exact, tolerance)
    assert np.abs(losses - exact).max() > 0  # it did compute in fewer bits
    assert {leaf.dtype for leaf in params.values()} == {np.dtype("float32")}


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("precision", [BF16(), F16()], ids=lambda p: p.kind)
def test_the_gradient_of_the_copy_has_the_very_values_of_that_of_the_parameters(
    precision, microbatches
):
    got, losses = walked(two_layers, precision, microbatches=microbatches)
    want, others = walked(two_layers, precision, microbatches=microbatches, inside=True)
    np.testing.assert_array_equal(losses, others)
    for name in WEIGHTS:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "precision"),
    [
        ("single", 1, 2, F16()), ("mirrored jit", 4, 1, F16()),
        ("mirrored shard_map", 2, 2, BF16()), ("mirrored pmap", 4, 1, F16()),
        ("fsdp", 2, 1, BF16()), ("fsdp", 4, 2, F16()),
    ],
)  # fmt: skip
def test_any_split_takes_the_steps_of_one_device(name, devices, microbatches, precision):
    # Rows are computed alike wherever they are; what differs is the order in which rounded products
    # are summed into the gradient of a weight, whose shares are rounded to the type.
    tolerance = 2.0 ** (-8 if precision.compute == jnp.bfloat16 else -11)
    want, exact = walked(two_layers, precision)
    got, losses = walked(
        two_layers, precision, strategy=strategy(name, devices), microbatches=microbatches
    )
    assert_close(losses, exact, tolerance)
    for leaf in want:
        assert np.linalg.norm(got[leaf] - want[leaf]) <= tolerance * np.linalg.norm(want[leaf])


def terms_of(loss, precision):
    terms = normalize_loss(compute_in(loss, precision.compute))
    data = jax.tree.map(jnp.asarray, batch())
    return lambda params: terms(params, (), data, jax.random.key(0))


def test_products_run_in_the_type_and_are_counted():
    checked = check_product_precision(terms_of(two_layers, BF16()), init(), jnp.bfloat16)
    assert checked == (2, 2)


def test_a_loss_whose_inputs_widen_everything_is_refused_and_the_advice_helps():
    with pytest.raises(LossError, match=r"2 matrix products multiply float32.*astype\(kernel"):
        check_product_precision(terms_of(uncast, BF16()), init(), jnp.bfloat16)

    def advised(params, batch, rng):
        return uncast(params, {**batch, "x": batch["x"].astype(params["up"].dtype)}, rng)

    assert check_product_precision(terms_of(advised, BF16()), init(), jnp.bfloat16) == (2, 2)
    assert check_product_precision(terms_of(uncast, F32()), init(), jnp.float32) == (2, 2)


def test_types_are_found_inside_loops_and_jits():
    body = lambda c, x: (jnp.tanh(c @ x), None)
    looped = lambda c, xs: jax.jit(lambda: jax.lax.scan(body, c, xs)[0])()
    half = jnp.ones((3, 2, 2), jnp.bfloat16)
    assert product_types(looped, half[0], half) == [jnp.bfloat16]


def test_state_beside_the_parameters_is_not_cast():
    seen = {}

    @jt.stateful
    def loss(params, extra, batch, rng):
        seen.update(params=params["up"].dtype, extra=extra["mean"].dtype, x=batch["x"].dtype)
        return two_layers(params, batch, rng), {}, extra

    step = make_step(compute_in(loss, jnp.bfloat16), optax.sgd(0.1))
    state = new_state(init(), optax.sgd(0.1), jax.random.key(0), {"mean": jnp.zeros(3)})
    jax.eval_shape(step, state, batch())
    assert seen == {"params": jnp.bfloat16, "extra": jnp.float32, "x": jnp.float32}


START = 2.0**15


def scale(factor=START, growth=2000, minimum=1.0):
    return LossScale.start(factor, growth=growth, minimum=minimum)


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
    before, _ = step(state_of(optimizer, scale=scale(64.0, growth=3)), rows_of())
    spoilt = rows_of() | {"y": np.full(8, np.nan, np.float32)}
    after, metrics = step(before, spoilt)
    assert (metrics["skipped"].value(), metrics["loss_scale"].value()) == (1, 64)
    assert np.isnan(metrics["loss"].value())
    assert (float(after.scale.factor), int(after.scale.good)) == (64, 1)
    for _ in range(2):
        after, _ = step(after, rows_of())
    assert float(after.scale.factor) == 128


@pytest.mark.thorough
def test_the_loss_is_told_as_it_is_though_it_overflows_scaled():
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_step(line, optimizer))
    state, metrics = step(state_of(optimizer, scale=scale(2.0**127)), rows_of())
    _, plain = step(state_of(optimizer), rows_of())
    assert metrics["loss"].value() == plain["loss"].value()
    assert float(state.scale.factor) == 2.0**126


def line(params, batch, rng):
    """Squared error of a line, in the type of its parameters."""
    guess = batch["x"].astype(params["w"].dtype) @ params["w"]
    error = guess.astype(jnp.float32) - batch["y"]
    return jt.Mean.of(jnp.square(error) * batch["size"], batch["mask"])


def rows_of(size=1.0):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8, 4)).astype(np.float32)
    y = x @ np.float32([1, -2, 0.5, 3])
    return {"x": x, "y": y, "size": np.full(8, size, np.float32)}


def state_of(optimizer, **scaling):
    params = {"w": jnp.zeros(4)}
    return new_state(params, optimizer, jax.random.key(0), **scaling)


@pytest.mark.thorough
def test_gradients_too_small_for_float16_survive_by_it():
    tiny, optimizer = rows_of(size=1e-8), optax.sgd(1e6)
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
    before, _ = step(state_of(optimizer, scale=scale(1024.0)), rows_of())
    after, metrics = step(before, rows_of(size=1e6))  # 1024 x 1e6 x 2 x error is beyond 65,504
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
        plain, told = step(plain, rows_of())
        scaled, also = step(scaled, rows_of())
    np.testing.assert_array_equal(plain.params["w"], scaled.params["w"])  # a power of two
    for name in ("loss", "grad_norm", "update_norm"):
        assert told[name].value() == also[name].value()
