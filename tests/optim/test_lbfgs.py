"""L-BFGS: a convex problem in few steps, the same however the batch is split; what it needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import strategy

from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.optim import LBFGS, AdamW, ParamGroup

pytestmark = pytest.mark.thorough

ROWS, DIMS, DECAY = 64, 30, 1e-4


def rows() -> dict[str, np.ndarray]:
    """Make two clouds of unequal width, along no axis."""
    draw = np.random.default_rng(0)
    label = draw.integers(2, size=ROWS)
    x = draw.normal(size=(ROWS, DIMS)) + (2 * label[:, None] - 1) * draw.normal(size=DIMS) / 3
    turned = np.linalg.qr(draw.normal(size=(DIMS, DIMS)))[0]
    return {
        "x": (x * np.geomspace(1, 3, DIMS) @ turned).astype(np.float32),
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
    where, optimizer, batch = strategy(name, devices), values.build(steps), rows()
    make = lambda: new_state(
        {"w": jnp.zeros(DIMS), "b": jnp.float32(0)}, optimizer, jax.random.key(0)
    )
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
    batch = rows()
    x = np.concatenate([batch["x"], np.ones((ROWS, 1))], 1).astype(np.float64)
    sign, w = 2.0 * batch["label"] - 1, np.zeros(DIMS + 1)
    for _ in range(50):
        p = 1 / (1 + np.exp(sign * (x @ w)))
        gradient = -(x * (sign * p)[:, None]).mean(0) + 2 * DECAY * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x / ROWS + 2 * DECAY * np.eye(DIMS + 1)
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
    batch = jax.tree.map(jnp.asarray, rows())
    problem = lambda w: logistic(w, batch, None).total / ROWS
    alone = lambda params: problem({**params, "b": jnp.float32(0)})
    params = {"w": jnp.zeros(DIMS), "b": jnp.float32(0)}
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
