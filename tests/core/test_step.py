"""One step: what it computes and costs, what it refuses, and that nothing not finite enters."""

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_language
from cases import by_name
from comparison import assert_close, bitwise, distance
from line import line, points, squared, start

import jtrain as jt
from chaos.numbers import PLACES, Fault, config
from jtrain.config.precision import F16
from jtrain.config.sections import RollbackPolicy
from jtrain.core.accumulate import accumulate
from jtrain.core.gradient import LossGradient, make_value_fn
from jtrain.core.mean import Mean
from jtrain.core.pytree import named_leaves
from jtrain.core.state import new_state
from jtrain.core.step import make_step, scan_steps
from jtrain.data import Arrays, Shuffled
from jtrain.errors import ConfigError
from jtrain.parallel import FSDP, Mirrored, Single
from jtrain.train.program import set_up

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


def test_a_key_of_another_generator_is_refused():
    with pytest.raises(ConfigError, match=r"Write jax\.random\.key\(0\)"):
        new_state((), SGD, jax.random.key(0, impl="rbg"))


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


LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"parallel": Single()},
    "one device, microbatches, float16": {
        "parallel": Single(),
        "microbatches": 2,
        "precision": F16(initial=4.0),
    },
    "fsdp": {"parallel": FSDP(devices=8, min_size=0)},
    "shard_map": {"parallel": Mirrored(devices=8, impl="shard_map"), "microbatches": 2},
    "pmap": {"parallel": Mirrored(devices=8, impl="pmap")},
}


def faults(count: int, seed: int) -> tuple[Fault, ...]:
    """One in every second batch, at each place at least once."""
    draw = random.Random(seed)
    places = [PLACES[n % len(PLACES)] for n in range(count)]
    draw.shuffle(places)
    return tuple(
        Fault(
            batch=2 * number,
            place=place,
            value=draw.choice(("nan", "inf", "-inf")),
            row=draw.randrange(16),
        )
        for number, place in enumerate(places)
    )


def bits(state) -> dict[str, Any]:
    """All leaves but the counts and the loss scale, as bytes."""
    found = named_leaves(jax.device_get(state))
    apart = {"step", "skipped", "scale/factor", "scale/good"}
    return {name: leaf.tobytes() for name, leaf in found.items() if name not in apart}


@pytest.mark.parametrize("layout", by_name(LAYOUTS, ["one device"], pytest.mark.thorough))
def test_a_fault_at_any_place_changes_no_bit_of_the_state(layout):
    given = faults(2 * len(PLACES), seed=7)
    parts = set_up(config("guard", given, steps_per_call=1, **layout))
    step, state = parts.compile_step(), parts.initial_state()
    for number in range(2 * len(given)):
        before, scale = bits(state), float(getattr(state.scale, "factor", 1))
        state, metrics = step(state, parts.place(parts.batches().train[number]))
        broken = number % 2 == 0
        what = given[number // 2] if broken else "a clean batch"
        same = {name for name, found in bits(state).items() if found == before[name]}
        moved = set(before) - same
        assert not moved if broken else moved > {"params/up", "extra/mean"}, what
        assert same if broken else "extra/still" in same, what
        assert int(state.skipped) == number // 2 + 1
        if scale > 1:
            overflow = broken and what.place.startswith("gradient")  # of the rest no scale is why
            assert float(state.scale.factor) == (scale / 2 if overflow else scale)
        if broken:
            numbers = [metrics[name].value() for name in ("loss", "grad_norm")]
            extra = what.place == "total of a change of extra"
            assert np.isfinite(numbers).all() == extra, what
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]
    assert all(map(bool, finite))


def test_the_average_of_the_parameters_is_among_what_stays():
    parts = set_up(config("guard", guard=RollbackPolicy()))
    assert any("average" in name for name in bits(parts.initial_state()))


ROWS, BATCH, BAD = 64, 16, 37
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)).astype(np.float32)
Y = X @ np.float32([1, 2, 3])
USE = np.ones(ROWS, bool)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


def with_bad(array, value):
    bad = np.array(array)
    bad[BAD] = value
    return bad


def loss(params, batch, rng):
    """Squared error of a line in the type of its parameters, where `use` holds."""
    del rng
    guess = batch["x"].astype(params["w"].dtype) @ params["w"]
    error = jnp.where(batch["use"], guess.astype(jnp.float32) - batch["y"], 0)
    return jt.Mean.of(jnp.square(error) * batch["size"], batch["mask"])


CLEAN: dict[str, Any] = {"x": X, "y": Y, "use": USE, "size": np.ones(ROWS, np.float32)}
NOT_USED = with_bad(USE, False)
UNHURT: dict[str, dict[str, Any]] = {
    "clean": {},
    "a masked NaN that reaches nothing": {"y": with_bad(Y, np.nan), "use": NOT_USED},
    # The slope of a row is 2 x error x 2,000 / 16: times 2^12 it is beyond 65,504.
    "an overflow": {"size": with_bad(CLEAN["size"], 2000.0)},
    # Its loss is hidden, and its gradient is NaN times 0: it is skipped as an overflow is.
    "a masked NaN that reaches the gradient": {"x": with_bad(X, np.nan), "use": NOT_USED},
}


@pytest.mark.thorough
@pytest.mark.parametrize("changes", by_name(UNHURT, ("an overflow",), pytest.mark.thorough))
def test_nothing_is_done_about_a_gradient_alone_above_the_smallest_scale(changes):
    data = Shuffled(Arrays(**(CLEAN | changes)), size=BATCH, seed=1)
    call = {"steps": 8, "precision": F16(initial=2.0**12), "guard": "stop", "quiet": True}
    start = {"w": np.zeros(3, np.float32)}
    result = jt.fit(
        loss, start, data, "sgd", lr=0.01, parallel="single", name="run", checkpoint_every=2, **call
    )
    assert result.step == 8
    assert not Path("runs/run/events.jsonl").exists()
    overflows = int(result.state.skipped)
    assert overflows == (2 if {"size", "x"} & changes.keys() else 0)
    assert float(result.state.scale.factor) == 2.0 ** (12 - overflows)
