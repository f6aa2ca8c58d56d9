"""Muon's matrices, which it takes and how they are split; L-BFGS: few steps, however split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import strategy

import jtrain as jt
from jtrain.core.mean import Mean
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.optim import LBFGS, AdamW, Muon, ParamGroup
from jtrain.parallel import Axes, Single

pytestmark = pytest.mark.thorough

SHAPES = [(16, 48), (128, 64)]


def direction(gradient: np.ndarray, **values) -> np.ndarray:
    """Return a matrix's first update at a rate of 1, uphill; size sqrt(max) x 1."""
    optimizer = Muon(lr=1.0, rms=1.0, weight_decay=0.0, momentum=0.0, **values).build(1)
    params = {"w": jnp.zeros(gradient.shape)}
    update = jax.jit(optimizer.update)
    updates, _ = update({"w": jnp.asarray(gradient)}, optimizer.init(params), params)
    return -np.asarray(updates["w"]) / max(gradient.shape[-2:]) ** 0.5


def decomposed(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return singular values over the Frobenius norm, before and after."""
    left, s, right = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    turned = left.T @ direction(gradient) @ right.T
    size = np.abs(turned - np.diag(np.diag(turned))).max()
    assert size < 2e-5, "singular vectors stay as they were"
    return s / np.linalg.norm(s), np.diag(turned)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 2], ids=["as drawn", "over four decades"])
def test_singular_values_are_brought_near_to_one(shape: tuple[int, int], spread: int):
    draw = np.random.default_rng(sum(shape))
    gradient = draw.normal(size=shape)
    if spread:
        left, s, right = np.linalg.svd(gradient, full_matrices=False)
        gradient = (left * np.logspace(-spread, spread, len(s))) @ right
    before, after = decomposed(gradient.astype(np.float32))
    large = before > 0.01
    assert large.any()
    assert spread == 0 or (~large).any(), "both kinds are tried"
    assert after[large].min() >= 0.68
    assert after[large].max() <= 1.14
    # The others are still on their way: the polynomial's slope at zero is 3.4445 an iteration.
    assert after[~large].max(initial=0) <= 1.21
    np.testing.assert_array_less(after[before < 1e-4], 3.4445**5 * before[before < 1e-4] * 1.01)


PARAMS = {
    "tokens": jnp.ones((5, 4)),
    "blocks": {"0": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}},
    "conv": {"kernel": jnp.ones((3, 3, 2, 2))},
    "head": jnp.ones((5, 4)),
}
OTHERS = {"tokens", "head", "blocks/0/bias", "conv/kernel"}


@pytest.mark.parametrize(
    ("values", "adam"),
    [
        ({}, OTHERS),
        ({"adamw": []}, OTHERS - {"head", "tokens"}),
        ({"stacks": ["conv/*"]}, OTHERS - {"conv/kernel"}),
    ],
)
def test_what_is_no_matrix_inside_takes_the_steps_of_adamw(values, adam: set[str]):
    draw = np.random.default_rng(0)
    gradient = jax.tree.map(lambda p: jnp.float32(draw.normal(size=p.shape)), PARAMS)
    groups = tuple(values.get("groups", ()))

    def first(optimizer):
        update = jax.jit(optimizer.update)
        return named_leaves(update(gradient, optimizer.init(PARAMS), PARAMS)[0])

    mine = Muon(lr=0.1, **values).build(3)
    found, wanted = first(mine), first(AdamW(lr=0.1, groups=groups).build(3))
    same = {name for name in found if np.abs(found[name] - wanted[name]).max() < 1e-6}
    frozen = {name for name in found if not np.any(found[name])}
    assert same - frozen == adam
    state = named_leaves(mine.init(PARAMS))
    squares = {name.partition("nu/")[2] for name in state if "/nu/" in name}
    assert squares == adam, "only these have Adam's second moment"


DIMS = {
    "stack": ("layers", "width", "hidden"),  # 8 matrices: enough for 4 devices
    **{f"blocks/{i}/up": ("width", "hidden") for i in range(3)},  # 3 in all: one is filled up
    "out": ("hidden", "width"),
    "experts": ("experts", "width", None),
    "bias": ("width",),
}
SPLIT_SHAPES = {"layers": 8, "width": 16, "hidden": 24, "experts": 4, None: 12}


def params() -> dict:
    """Random leaves of the dims above."""
    draw = np.random.default_rng(0)
    leaf = lambda name: jnp.asarray(
        0.1 * draw.normal(size=[SPLIT_SHAPES[dim] for dim in DIMS[name]]), jnp.float32
    )
    blocks = {f"{i}": {"up": leaf(f"blocks/{i}/up")} for i in range(3)}
    names = [name for name in DIMS if not name.startswith("blocks")]
    return {"blocks": blocks} | {name: leaf(name) for name in names}


def loss(params, batch, rng):
    """A sum of squares of what each leaf makes of a row: no gradient is zero or of rank one."""
    x = batch["x"]
    hidden = jnp.tanh(x @ params["out"].T[:, :16])
    found = x + params["bias"][None]
    for matrix in [*(params["blocks"][f"{i}"]["up"] for i in range(3)), *params["stack"]]:
        found = found + jnp.tanh(found @ matrix)[:, :16]
    for expert in params["experts"]:
        found = found + jnp.pad(jnp.tanh(hidden @ expert), ((0, 0), (0, 4)))
    return jt.Mean.of(jnp.square(found - x[:, ::-1]).sum(-1), batch["mask"])


def rows(count: int = 32) -> dict:
    """A batch."""
    x = np.random.default_rng(1).normal(size=(count, 16)).astype(np.float32)
    return {"x": x, "row": np.arange(count, dtype=np.int32), "mask": np.ones(count, bool)}


def compiled(where, rule):
    """Return the program of a step, and a first state."""
    make = lambda: new_state(params(), rule, jax.random.key(1))
    like = jax.eval_shape(make)
    state = jax.jit(make, out_shardings=where.shardings(like, DIMS))()
    sharding = where.gradient_sharding(like.params, DIMS)
    step = make_step(loss, rule, sharding=sharding)
    return where.lower(step, state, where.place(rows()), returns_state=True).compile(), state


MUON = Muon(lr=0.05, stacks=("stack", "experts"), adamw=())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"fsdp": 4}, id="fsdp"),
        pytest.param({"fsdp": 2, "tensor": 2}, id="both"),
        pytest.param({"fsdp": 2, "expert": 2}, id="experts"),
        pytest.param({"data": 2, "fsdp": 2, "zero": 1}, id="zero 1"),
    ],
)
def test_matrices_that_are_split_take_the_step_of_one_device(layout: dict):
    rule = MUON.build(10, DIMS)
    ends = []
    for parallel in (Single(), Axes(devices=4, min_size=0, **layout)):
        program, state = compiled(where := parallel.build(), rule)
        first = jax.device_get(state.params)
        for _ in range(2):
            state, _ = program(state, where.place(rows()))
        ends.append(jax.device_get(state.params))
    moved = jax.tree.map(lambda a, b: a - b, ends[0], first)
    apart = jax.tree.map(lambda a, b: a - b, ends[1], ends[0])
    # The iterations amplify rounding of small singular values by up to 3.4445**5 a step.
    size = lambda tree: np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))
    assert size(moved) > 1e-2
    assert size(apart) < 1e-3 * size(moved), distance(*ends)


def test_whole_matrices_cost_one_exchange_there_and_one_back():
    where = Axes(devices=4, fsdp=4, min_size=0).build()

    def sent(rule) -> dict[str, int]:
        program, _ = compiled(where, rule)
        found: dict[str, int] = {}
        text = HloProgram(program.as_text())
        for one in collectives_of(text, dict(where.mesh.shape)).collectives:
            found[one.kind] = found.get(one.kind, 0) + one.sent
        return found

    muon, adamw = sent(MUON.build(10, DIMS)), sent(AdamW(lr=0.05).build(10, DIMS))
    more = sum(muon.values()) - sum(adamw.values())
    elements = num_elements(params()) + 16 * 24  # and the matrix of zeros
    assert 0 < more <= 2 * 4 * elements / 4, "bytes of a device's shard, in float32, twice"
    assert muon["all-to-all"] > adamw.get("all-to-all", 0)


ROWS, WIDTH, DECAY = 64, 30, 1e-4


def points() -> dict[str, np.ndarray]:
    """Make two clouds of unequal width, along no axis."""
    draw = np.random.default_rng(0)
    label = draw.integers(2, size=ROWS)
    x = draw.normal(size=(ROWS, WIDTH)) + (2 * label[:, None] - 1) * draw.normal(size=WIDTH) / 3
    turned = np.linalg.qr(draw.normal(size=(WIDTH, WIDTH)))[0]
    return {
        "x": (x * np.geomspace(1, 3, WIDTH) @ turned).astype(np.float32),
        "label": label.astype(np.int32),
        "row": np.arange(ROWS, dtype=np.int32),
        "mask": np.ones(ROWS, bool),
    }


def logistic(params, batch, rng):
    """Compute the logistic loss with a little decay that makes it strictly convex."""
    del rng
    score = batch["x"] @ params["w"] + params["b"]
    sign = 2.0 * batch["label"] - 1
    decay = DECAY * (jnp.square(params["w"]).sum() + jnp.square(params["b"]))
    return Mean.of(jax.nn.softplus(-sign * score) + decay, batch["mask"])


@functools.cache
def fit(values, steps, microbatches=1, name="single", devices=1):
    """Return the losses before each step, and the parameters after the last."""
    where, optimizer, batch = strategy(name, devices), values.build(steps), points()
    params = {"w": jnp.zeros(WIDTH), "b": jnp.float32(0)}
    make = lambda: new_state(params, optimizer, jax.random.key(0))
    state = jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
    step = make_step(logistic, optimizer, microbatches=microbatches, psum=where.psum)
    placed = where.place(batch)
    step, losses = where.compile(step, state, placed, returns_state=True), []
    for _ in range(steps):
        state, metrics = step(state, placed)
        losses.append(metrics["loss"].value())
    return losses, jax.device_get(state.params)


def lowest() -> float:
    """Return the loss at the minimum, by Newton's method in float64."""
    batch = points()
    x = np.concatenate([batch["x"], np.ones((ROWS, 1))], 1).astype(np.float64)
    sign, w = 2.0 * batch["label"] - 1, np.zeros(WIDTH + 1)
    for _ in range(50):
        p = 1 / (1 + np.exp(sign * (x @ w)))
        gradient = -(x * (sign * p)[:, None]).mean(0) + 2 * DECAY * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x / ROWS + 2 * DECAY * np.eye(WIDTH + 1)
        w -= np.linalg.solve(hessian, gradient)
    assert np.abs(gradient).max() < 1e-12
    return float(np.mean(np.log1p(np.exp(-sign * (x @ w)))) + DECAY * w @ w)


def test_needs_a_tenth_of_the_steps_of_adamw():
    losses, _ = fit(LBFGS(), 40)
    rates = (0.03, 0.1, 0.3)
    others = [fit(AdamW(lr=lr, weight_decay=0.0), 200)[0][-1] for lr in rates]
    assert np.argmin(others) == 1, "its best rate is among those tried"
    assert losses[20] < 0.95 * min(others)
    assert losses[-1] == pytest.approx(lowest(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "devices", "microbatches"),
    [
        ("single", 1, 2),
        ("mirrored shard_map", 4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("mirrored jit", 4, 1), ("mirrored pmap", 2, 1), ("fsdp", 2, 2)]
        ),
    ],
)
def test_the_split_of_the_batch_changes_no_step(name: str, devices: int, microbatches: int):
    want, params = fit(LBFGS(), 40)
    got, there = fit(LBFGS(), 40, microbatches, name, devices)
    # Curvature divides by small differences, so that what is rounded otherwise soon tells.
    assert_close(got[:6], want[:6], 1e-4)
    assert want[5] < want[0] / 10
    assert got[-1] == pytest.approx(want[-1], rel=1e-4)
    assert distance(there, params) < 1e-2


def test_with_leaves_frozen_it_takes_optax_steps_of_the_others():
    batch = jax.tree.map(jnp.asarray, points())
    problem = lambda w: logistic(w, batch, None).total / ROWS
    alone = lambda params: problem({**params, "b": jnp.float32(0)})
    params = {"w": jnp.zeros(WIDTH), "b": jnp.float32(0)}
    frozen = LBFGS(memory=4, groups=(ParamGroup(match="b", freeze=True),)).build(5)
    want = _followed(optax.lbfgs(memory_size=4), {"w": params["w"]}, alone)
    got = _followed(frozen, params, problem)
    assert_close(got["w"], want["w"], 1e-4)
    assert got["b"] == 0


def _followed(optimizer, params, problem, steps=3):
    """Return the parameters after some steps."""

    def step(carry, _):
        params, state = carry
        value, grad = jax.value_and_grad(problem)(params)
        known = {"value": value, "grad": grad, "value_fn": problem}
        updates, state = optimizer.update(grad, state, params, **known)
        return (optax.apply_updates(params, updates), state), None

    walk = jax.jit(lambda start: jax.lax.scan(step, start, length=steps)[0][0])
    return walk((params, optimizer.init(params)))
