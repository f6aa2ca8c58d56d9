"""What holds for every optimizer. A new member is a new row of MEMBERS, with its formula."""

import functools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from comparison import assert_close, assert_leaves_close, distance
from layouts import STRATEGIES, strategy
from layouts import start as start_language
from tiny_language import batches, loss_of, stack_layers

from jtrain.core import pytree
from jtrain.core.step import make_step
from jtrain.optim import (
    LBFGS,
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Cosine,
    Lamb,
    Lion,
    Muon,
    NAdamW,
    Optax,
    Optimizer,
    ParamGroup,
    ScheduleFree,
    evaluation_params,
)

STEPS = 30
TARGET = {"layer": {"kernel": np.array([[1.0, -2.0], [0.5, 3.0]]), "bias": np.array([0.3, -0.7])}}
CURVATURE = {"layer": {"kernel": np.array([[1.0, 2.0], [0.5, 1.5]]), "bias": np.array([1.0, 3.0])}}


class Row(NamedTuple):
    """A member, and what one step of it does to one leaf, written by hand."""

    values: Optimizer
    formula: Callable[[np.ndarray, np.ndarray, dict, int, float, float], np.ndarray]
    odd: tuple[str, ...] = ()
    """Parts of the state whose leaves have no parameter's shape."""


def sgd(p, g, memory, t, lr, decay):
    del t, memory
    return p - lr * (g + decay * p)


def momentum(p, g, memory, t, lr, decay):
    memory["m"] = 0.9 * memory.get("m", 0) + g + decay * p
    return p - lr * memory["m"]


def nesterov(p, g, memory, t, lr, decay):
    g = g + decay * p
    memory["m"] = 0.9 * memory.get("m", 0) + g
    return p - lr * (g + 0.9 * memory["m"])


def _adam_direction(g, memory, t, ahead=False):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g**2
    m, v = memory["m"] / (1 - 0.9 ** (t + 1)), memory["v"] / (1 - 0.95 ** (t + 1))
    if ahead:
        m = 0.9 * memory["m"] / (1 - 0.9 ** (t + 2)) + 0.1 * g / (1 - 0.9 ** (t + 1))
    return m / (np.sqrt(v) + 1e-6)


def adam(p, g, memory, t, lr, decay):
    return p - lr * _adam_direction(g + decay * p, memory, t)


def adamw(p, g, memory, t, lr, decay):
    return p - lr * (_adam_direction(g, memory, t) + decay * p)


def nadamw(p, g, memory, t, lr, decay):
    return p - lr * (_adam_direction(g, memory, t, ahead=True) + decay * p)


def lamb(p, g, memory, t, lr, decay):
    u = _adam_direction(g, memory, t) + decay * p
    return p - lr * u * np.linalg.norm(p) / np.linalg.norm(u)


def lion(p, g, memory, t, lr, decay):
    m = memory.get("m", np.zeros_like(g))
    memory["m"] = 0.99 * m + 0.01 * g
    return p - lr * (np.sign(0.9 * m + 0.1 * g) + decay * p)


def adafactor(p, g, memory, t, lr, decay):
    kept, squares = 1 - (t + 1) ** -0.8, g**2 + 1e-30
    if g.ndim == 2:
        rows, columns = memory.get("rc", (0, 0))
        rows = kept * rows + (1 - kept) * squares.mean(1)
        columns = kept * columns + (1 - kept) * squares.mean(0)
        memory["rc"] = rows, columns
        v = np.outer(rows, columns) / rows.mean()
    else:
        v = memory["v"] = kept * memory.get("v", 0) + (1 - kept) * squares
    u = g / np.sqrt(v)
    u = u / max(1, np.sqrt((u**2).mean())) * max(1e-3, np.sqrt((p**2).mean()))
    u = memory["m"] = 0.5 * memory.get("m", 0) + 0.5 * u
    return p - lr * (u + decay * p)


def muon(p, g, memory, t, lr, decay):
    if g.ndim != 2:
        return adamw(p, g, memory, t, lr, decay)
    memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
    x = 0.95 * memory["m"] / (1 - 0.95 ** (t + 2)) + 0.05 * g / (1 - 0.95 ** (t + 1))
    left, s, right = np.linalg.svd(x)  # the polynomial acts on the singular values alone
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return p - lr * (0.2 * max(g.shape) ** 0.5 * (left * s) @ right + decay * p)


def schedule_free(y, g, memory, t, lr, decay):
    z, x, weights, most = memory.get("zxwm", (y, y, 0, 0))
    v = memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g**2
    z = z - lr * (g / (np.sqrt(v / (1 - 0.95 ** (t + 1))) + 1e-6) + decay * y)
    most = max(most, lr)
    weights += most**2
    x = x + (z - x) * most**2 / weights
    memory["zxwm"] = z, x, weights, most
    return 0.9 * x + 0.1 * z


_decay = {"weight_decay": 0.05}
_adams = {"b2": 0.95, "eps": 1e-6, **_decay}
_small = {"factor_from": 2, "momentum": 0.5}
MEMBERS = {
    "sgd": Row(SGD(lr=0.2, **_decay), sgd),
    "momentum": Row(SGD(lr=0.05, momentum=0.9, **_decay), momentum),
    "nesterov": Row(SGD(lr=0.05, momentum=0.9, nesterov=True, **_decay), nesterov),
    "adam": Row(Adam(lr=0.3, **_adams), adam),
    "adamw": Row(AdamW(lr=0.3, **_adams), adamw),
    "nadamw": Row(NAdamW(lr=0.3, **_adams), nadamw),
    "lamb": Row(Lamb(lr=0.1, **_adams), lamb),
    "lion": Row(Lion(lr=0.1, **_decay), lion),
    "adafactor": Row(Adafactor(lr=0.3, **_small, **_decay), adafactor, ("v_row", "v_col", "v")),
    "muon": Row(Muon(lr=0.3, **_adams), muon, ("ns_coeffs",)),
    "schedule_free": Row(ScheduleFree(lr=0.3, **_adams), schedule_free),
    "averaged": Row(AdamW(lr=0.3, ema=0.9, **_adams), adamw),
}
# They have no weight decay of ours, and tests of their own in tests/optim/.
_parts = ("diff_params", "diff_updates", "weights_memory")
OTHERS = {
    "lbfgs": Row(LBFGS(), lambda *_: np.nan, _parts),
    "prodigy": Row(Optax(lr=1.0, name="contrib.prodigy"), lambda *_: np.nan),
}
EVERY = {**MEMBERS, **OTHERS}
every = pytest.mark.parametrize("row", EVERY.values(), ids=EVERY.keys())
by_formula = pytest.mark.parametrize("row", MEMBERS.values(), ids=MEMBERS.keys())


def start() -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape) + 0.1, TARGET)


def bowl(params: Any) -> Any:
    """A quadratic with its minimum at TARGET."""
    parts = jax.tree.map(lambda p, t, c: (c * (p - t) ** 2).sum(), params, TARGET, CURVATURE)
    return sum(jax.tree.leaves(parts))


def update(optimizer: Any, params: Any, state: Any) -> Any:
    """The updates of one step and the state after it, as the step of a run asks for them."""
    value, grads = jax.value_and_grad(bowl)(params)
    full = optax.with_extra_args_support(optimizer).update
    return full(grads, state, params, value=value, grad=grads, value_fn=bowl)


def train(values: Optimizer, steps: int) -> Any:
    optimizer = values.build(steps)
    params = start()

    @jax.jit
    def step(params, state):
        updates, state = update(optimizer, params, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def replace(row: Row, **changes: Any) -> Optimizer:
    """The row's values but for some, through the checks that a config goes through."""
    adapter = pydantic.TypeAdapter(Optimizer)
    return adapter.validate_python({**adapter.dump_python(row.values), **changes})


@pytest.mark.thorough
@by_formula
def test_takes_the_steps_of_its_formula(row: Row):
    schedule = Cosine(warmup=3, final=0.1)
    values = replace(row, schedule={"kind": "cosine", "warmup": 3, "final": 0.1}, clip=5.0)
    rate = schedule.build(values.lr, 10)
    params = pytree.named_leaves(jax.tree.map(np.float64, start()))
    memory: dict[str, dict] = {name: {} for name in params}
    target, curvature = pytree.named_leaves(TARGET), pytree.named_leaves(CURVATURE)
    clipped = 0
    for t in range(10):
        gradient = {n: 2 * curvature[n] * (params[n] - target[n]) for n in params}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        clipped += norm > 5
        for n, g in gradient.items():
            decay = 0.05 if n.endswith("kernel") else 0.0
            g = g * min(1, 5 / norm)
            params[n] = row.formula(params[n], g, memory[n], t, float(rate(t)), decay)
    found = pytree.named_leaves(train(values, 10))
    assert clipped > 0, "the formula's clipping was never tried"
    for n in params:
        assert_close(found[n], params[n], 1e-5, says=n)


@every
def test_its_state_keeps_its_structure_and_is_laid_out_like_the_parameters(row: Row):
    optimizer, params = row.values.build(STEPS), start()
    state = optimizer.init(params)
    updates, after = jax.eval_shape(lambda p, s: update(optimizer, p, s), params, state)
    assert pytree.describe(after) == pytree.describe(state)
    assert pytree.describe(updates) == pytree.describe(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    shapes = {name: leaf.shape for name, leaf in pytree.named_leaves(params).items()}
    for name, leaf in pytree.named_leaves(state).items():
        owners = [n for n in shapes if name.endswith("/" + n)]
        alike = len(owners) == 1 and shapes[owners[0]] == leaf.shape
        odd = any(f"/{part}" in name for part in row.odd)
        assert leaf.ndim == 0 or alike or odd, name


@pytest.mark.sampled(4)
@by_formula
def test_frozen_leaves_do_not_move_and_have_no_state(row: Row):
    frozen = replace(row, groups=[{"match": "*/bias", "freeze": True}])
    params = start()
    after = train(frozen, 3)
    np.testing.assert_array_equal(after["layer"]["bias"], params["layer"]["bias"])
    assert distance(after["layer"]["kernel"], params["layer"]["kernel"]) > 1e-3
    state = pytree.named_leaves(frozen.build(STEPS).init(params))
    assert not [name for name in state if name.endswith("bias")]


@pytest.mark.sampled(3)
@by_formula
def test_a_group_scales_its_learning_rate(row: Row):
    """One step from one state: the update is the factor times what it was."""
    params, gradient = start(), jax.grad(bowl)(start())

    def first(values):
        optimizer = values.build(STEPS)
        return optimizer.update(gradient, optimizer.init(params), params)[0]["layer"]

    plain = first(row.values)
    slow = first(replace(row, groups=[{"match": "*/bias", "lr_factor": 0.1}]))
    assert_close(slow["bias"], 0.1 * plain["bias"], 1e-6)
    np.testing.assert_array_equal(slow["kernel"], plain["kernel"])


@pytest.mark.sampled(3)
@by_formula
def test_decays_what_it_is_told_to(row: Row):
    """With no gradient, what decays shrinks and all else stays."""
    kernel, bias = (
        ("layer/kernel", lambda u: u["layer"]["kernel"]),
        ("layer/bias", lambda u: u["layer"]["bias"]),
    )
    params = start()
    for changes, decays in [
        ({}, {kernel[0]}),
        ({"decay": ["*/bias"]}, {bias[0]}),
        ({"decay": ["*"]}, {kernel[0], bias[0]}),
        ({"groups": [{"match": "*/kernel", "weight_decay": 0}]}, set()),
        ({"weight_decay": 0.0, "groups": [{"match": "*/bias", "weight_decay": 0.1}]}, {bias[0]}),
    ]:
        optimizer = replace(row, **changes).build(STEPS)
        nothing = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(nothing, optimizer.init(params), params)
        moved = {name for name, get in (kernel, bias) if (get(updates) < -1e-6).all()}
        # To the last bit of 0.1: schedule_free finds the mean from what lies beside it.
        still = {name for name, get in (kernel, bias) if (abs(get(updates)) < 1e-8).all()}
        assert (moved, still) == (decays, {kernel[0], bias[0]} - decays), changes


def blocks(seed: int) -> Any:
    """A leaf for each of three layers, of the dims that a transformer's layers have."""
    draw = np.random.default_rng(seed).standard_normal
    one = lambda: {"kernel": jnp.float32(draw((4, 6))), "scale": jnp.float32(draw(6))}
    experts = lambda: {"experts": jnp.float32(draw((2, 4, 6)))}
    return {
        "blocks": {str(i): one() | experts() for i in range(3)},
        "head": jnp.float32(draw((5, 4))),
    }


STACKED = {
    "blocks/kernel": ("layers", "width", "hidden"),
    "blocks/scale": ("layers", None),
    "blocks/experts": ("layers", "experts", "width", "hidden"),
    "head": ("vocab", "width"),
}


@pytest.mark.thorough
@by_formula
def test_takes_the_steps_of_layers_written_out_where_they_are_stacked(row: Row):
    """The gradients are given, and no sum is taken over layers: nothing here cancels."""
    # Three layers are fewer than the four that are factored.
    values = replace(row, factor_from=4) if isinstance(row.values, Adafactor) else row.values

    def walk(params, stack, dims):
        optimizer = values.build(STEPS, dims)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for seed in range(1, 4):
            updates, state = update(stack(blocks(seed)), state, params)
            params = optax.apply_updates(params, updates)
        return params

    want = stack_layers(walk(blocks(0), lambda tree: tree, {}))
    got = walk(stack_layers(blocks(0)), stack_layers, STACKED)
    assert_leaves_close(got, want, 2e-6)


# Each member on a layout of its own, so that all layouts are met; the whole matrix is slow. Plain
# SGD and AdamW are in test_every_strategy.py, the line search in tests/optim/test_lbfgs.py.
SPLITS = [(name, count) for name in STRATEGIES for count in (1, 2)][1:]  # the first is not a split
NAMES = [name for name in MEMBERS if name not in ("sgd", "adamw")]
FEW = {(name, *SPLITS[i % len(SPLITS)]) for i, name in enumerate(NAMES)}
MATRIX = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
    for case in ((name, *split) for name in NAMES for split in SPLITS)
]


@functools.cache
def walk(name: str, layout: str, microbatches: int) -> tuple[list[float], Any]:
    """The losses of three steps of a tiny language model, and its parameters after them."""
    values = replace(MEMBERS[name], lr=MEMBERS[name].values.lr / 10)
    where, optimizer = strategy(layout, 1 if layout == "single" else 4), values.build(3)
    state = start_language(where, optimizer)
    loss = loss_of("ragged", False)
    step = make_step(loss, optimizer, microbatches=microbatches, psum=where.psum, ragged=True)
    rows = [where.place(batch) for batch in batches("ragged", 3)]
    step, losses = where.compile(step, state, rows[0], returns_state=True), []
    for batch in rows:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].value())
    return losses, jax.device_get(evaluation_params(optimizer, state))


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout", "microbatches"), MATRIX)
def test_takes_the_steps_of_one_device_on_any_layout(name: str, layout: str, microbatches: int):
    losses, params = walk(name, layout, microbatches)
    want, there = walk(name, "single", 1)
    assert want[-1] < want[0], "it has learned something"
    assert_close(losses, want, 1e-6)
    assert distance(params, there) < 1e-6


def test_every_member_has_a_row_and_reads_itself_back_from_plain_data():
    choice = typing.get_args(typing.get_args(Optimizer)[0])
    assert {type(row.values) for row in EVERY.values()} == set(choice)
    adapter = pydantic.TypeAdapter(Optimizer)
    for row in EVERY.values():
        assert adapter.validate_json(adapter.dump_json(row.values)) == row.values


@pytest.mark.thorough
def test_frozen_leaves_do_not_count_for_the_clip():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    gradient = {"a": jnp.array([3.0, 4.0]), "b": jnp.full(2, jnp.nan)}
    optimizer = SGD(lr=1.0, clip=1.0, groups=(ParamGroup(match="b", freeze=True),)).build(1)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    assert_close(updates["a"], [-0.6, -0.8], 1e-6)
    np.testing.assert_array_equal(updates["b"], [0, 0])
