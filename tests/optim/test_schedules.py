"""Learning rates as text; groups of parameters; clipping by the norm; optax's rules by name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from pydantic import TypeAdapter, ValidationError

from chaos.numbers import config
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.optim import (
    Constant,
    Cosine,
    Exponential,
    InverseSquareRoot,
    Join,
    LinearSchedule,
    OneCycle,
    Optax,
    Optimizer,
    ParamGroup,
    Restarts,
    SchedulePiece,
    WarmupStableDecay,
)
from jtrain.optim.groups import group_of, matches
from jtrain.optim.join import Schedule
from jtrain.optim.transformations import clip_by_norm
from jtrain.parallel import FSDP
from jtrain.train.program import set_up

GOLDEN = Path(__file__).parents[1] / "golden" / "learning_rates.txt"
STEPS = 12
CURVES = {
    "constant": Constant(),
    "constant, warmup 4": Constant(warmup=4),
    "linear": LinearSchedule(),
    "linear, warmup 3, final 0.5": LinearSchedule(warmup=3, final=0.5),
    "cosine": Cosine(),
    "cosine, warmup 3, final 0": Cosine(warmup=3, final=0.0),
    "wsd": WarmupStableDecay(),
    "wsd, warmup 2, decay 0.5, final 0.1": WarmupStableDecay(warmup=2, decay=0.5, final=0.1),
    "inverse root": InverseSquareRoot(),
    "inverse root, warmup 3, timescale 2": InverseSquareRoot(warmup=3, timescale=2),
    "exponential": Exponential(),
    "exponential, first 0.01, final 1": Exponential(first=0.01, final=1.0),
    "one cycle": OneCycle(),
    "one cycle, rise 0.5, first 0.5, final 0.1": OneCycle(rise=0.5, first=0.5, final=0.1),
    "restarts, cycles 3": Restarts(cycles=3),
    "restarts, warmup 3, cycles 2, growth 2, final 0.1": Restarts(warmup=3, cycles=2, growth=2,
        final=0.1),
    "join: 2 at 0.5, then linear": Join(pieces=(SchedulePiece(steps=2, peak=0.5),
        SchedulePiece(schedule=LinearSchedule(warmup=1, final=0.5)))),
}  # fmt: skip


def curve(schedule: Schedule, peak: float = 1.0, steps: int = STEPS) -> np.ndarray:
    return np.asarray(jax.vmap(schedule.build(peak, steps))(jnp.arange(steps)))


@pytest.mark.thorough
def test_curves_are_those_of_the_golden_file():
    width = max(map(len, CURVES))
    text = "".join(
        f"{name:{width}} | {' '.join(f'{rate:.4f}' for rate in curve(schedule))}\n"
        for name, schedule in CURVES.items()
    )
    split = lambda t: [line.split("|") for line in t.splitlines()]
    found, golden = split(text), split(GOLDEN.read_text())
    assert [line[0] for line in found] == [line[0] for line in golden], f"the new text:\n{text}"
    for (name, new), (_, old) in zip(found, golden, strict=True):
        message = f"{name}: the new text:\n{text}"
        new, old = (np.array(rates.split(), float) for rates in (new, old))
        assert_close(new, old, 1.01e-4, terms=1, says=message)


@pytest.mark.thorough
def test_every_schedule_ends_where_it_says():
    for schedule in CURVES.values():
        if hasattr(schedule, "final") or isinstance(schedule, Constant):
            final = getattr(schedule, "final", 1.0)
            rates = curve(schedule, peak=0.3, steps=1000)
            assert rates[-1] == pytest.approx(0.3 * final, abs=1e-7)
            assert rates.max() == pytest.approx(0.3)
            assert float(schedule.build(0.3, 1000)(5000)) == pytest.approx(0.3 * final, abs=1e-7)


@pytest.mark.thorough
def test_the_log_reads_the_rate_that_the_step_takes():
    """Check that the rate of an int is a float by numpy, and that of an array is by jax."""
    for schedule in CURVES.values():
        rate = schedule.build(0.3, STEPS)
        logged = [rate(step) for step in range(STEPS)]
        assert all(type(value) is float for value in logged)
        assert_close(logged, curve(schedule, 0.3), 2e-6)


def test_one_cycle_is_torchs_where_both_have_their_turns():
    """OneCycleLR(total_steps=101, pct_start=0.3): cosines through peak / 25, peak, peak / 25e4."""
    rates = curve(OneCycle(), peak=1.0, steps=101)
    assert rates[[0, 30, 100]] == pytest.approx([1 / 25, 1, 1 / 25e4], rel=1e-4)
    assert rates[15] == pytest.approx((1 / 25 + 1) / 2, rel=1e-5)
    assert rates[65] == pytest.approx((1 + 1 / 25e4) / 2, rel=1e-5)
    assert (np.diff(rates[:31]) > 0).all()
    assert (np.diff(rates[30:]) < 0).all()


NAMES = ["embed/table", "blocks/0/mlp/kernel", "blocks/0/mlp/bias", "blocks/1/mlp/kernel", "head/w"]


def test_a_pattern_finds_its_leaves():
    for pattern, found in [
        ("*", NAMES),
        ("*/embed/*", ["embed/table"]),
        ("*/kernel", ["blocks/0/mlp/kernel", "blocks/1/mlp/kernel"]),
        ("blocks/[1-9]/*", ["blocks/1/mlp/kernel"]),
        ("*/mlp/????", ["blocks/0/mlp/bias"]),
        ("kernel", []),
    ]:
        assert [name for name in NAMES if matches(name, pattern)] == found


def test_the_first_group_that_matches_counts():
    groups = (
        ParamGroup(match="*/bias", lr_factor=2.0),
        ParamGroup(match="blocks/*", lr_factor=3.0),
    )
    factors = {n: g.lr_factor for n in NAMES if (g := group_of(n, groups))}
    assert factors == {
        "blocks/0/mlp/kernel": 3.0,
        "blocks/0/mlp/bias": 2.0,
        "blocks/1/mlp/kernel": 3.0,
    }


GRADS: Any = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}


@pytest.mark.parametrize(
    ("touched", "size"),
    [
        (lambda g: dict(g), 10.0),  # as it came: by the norm that was given
        (lambda g: {**g, "a": g["a"] * 2}, np.hypot(6, 4)),
        (lambda g: {"b": g["b"]}, 4.0),
    ],
)
def test_the_norm_of_the_step_is_that_of_its_own_gradients_alone(touched, size):
    given = touched(GRADS)
    known = {"grad": GRADS, "grad_norm": jnp.float32(10)}  # not the true one, to tell them apart
    updates: Any = clip_by_norm(1.0).update(given, optax.EmptyState(), None, **known)[0]
    assert_close(updates["b"], given["b"] / size, 1e-6)


@pytest.mark.thorough
def test_no_collective_is_in_a_branch_on_eight_devices():
    parts = set_up(config("clips", parallel=FSDP(devices=8, min_size=0)))
    program = HloProgram(parts.lower_step().compile().as_text())
    operations = [instruction.operation for instruction, *_ in program.walk()]
    assert [name for name in operations if "all-" in name], "there is what to send"
    assert "conditional" not in operations


PARAMS = {"kernel": jnp.arange(6.0).reshape(2, 3) / 6, "bias": jnp.ones(3)}
MADE = {
    "rmsprop": (lambda rate: optax.rmsprop(rate, momentum=0.9), {"momentum": 0.9}),
    "contrib.prodigy": (optax.contrib.prodigy, {}),
    "contrib.momo": (optax.contrib.momo, {}),  # takes the value of the loss
}


def walk(optimizer: optax.GradientTransformation, steps: int = 4) -> dict[str, np.ndarray]:
    loss = lambda p: sum(((x - 0.3) ** 2).sum() for x in jax.tree.leaves(p))
    update = optax.with_extra_args_support(optimizer).update
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = update(grads, state, params, value=value, grad=grads)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


@pytest.mark.parametrize("name", MADE)
def test_takes_the_steps_of_optax(name: str):
    make, args = MADE[name]
    schedule = {"kind": "linear", "warmup": 2}
    values = Optax(lr=0.1, name=name, args=args, schedule=schedule)  # pyright: ignore
    expected = walk(make(values.learning_rate(8)))
    jax.tree.map(np.testing.assert_array_equal, walk(values.build(8)), expected)


def test_groups_scale_and_freeze_it():
    plain = walk(Optax(lr=0.1, name="rmsprop").build(1), 1)
    groups = (ParamGroup(match="bias", freeze=True), ParamGroup(match="kernel", lr_factor=0.5))
    found = walk(Optax(lr=0.1, name="rmsprop", groups=groups).build(1), 1)
    np.testing.assert_array_equal(found["bias"], PARAMS["bias"])
    moved = lambda params: params["kernel"] - PARAMS["kernel"]
    assert_close(moved(found), 0.5 * moved(plain), 1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adamw", "weight_decay": 0.1}, "optimizer.args={weight_decay: 0.1}"),
        ({"name": "contrib.schedule_free_sgd"}, "write optimizer.kind=schedule_free"),
    ],
)
def test_what_it_cannot_take_is_refused_with_what_to_type(values, message: str):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Optimizer).validate_python({"kind": "optax", "lr": 0.1, **values})
