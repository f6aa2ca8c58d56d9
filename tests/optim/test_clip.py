from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close

import jtrain as jt
from chaos.numbers import config
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.optim import SGD, AdamW, ParamGroup
from jtrain.optim.clip import clip_by_norm
from jtrain.parallel import FSDP
from jtrain.train.setup import set_up

GRADS: Any = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}


@pytest.mark.parametrize("most", [1.0, 4.9, 5.1])
def test_is_optax_own_clip(most: float):
    updates: Any = clip_by_norm(most).update(GRADS, optax.EmptyState())[0]
    wanted: Any = optax.clip_by_global_norm(most).update(GRADS, optax.EmptyState())[0]
    assert_leaves_close(updates, wanted, 1e-6)


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


def squares(params, batch, rng):
    residual = batch["x"] @ params["a"] + params["b"][None] - 1
    return jt.Mean.of(residual**2, batch["mask"])


@pytest.mark.parametrize(
    ("optimizer", "sums"),  # one a leaf
    [
        (AdamW(lr=1e-2, clip=1.0), 0),
        (SGD(lr=1e-2, clip=1.0, clip_value=0.5), 2),
        (AdamW(lr=1e-2, clip=1.0, groups=(ParamGroup(match="b", freeze=True),)), 2),
    ],
)
def test_no_norm_is_summed_in_the_branch_unless_the_gradients_were_changed(optimizer, sums):
    built = optimizer.build(10)
    params = {"a": jnp.ones(3), "b": jnp.zeros(())}
    state = new_state(params, built, jax.random.key(0))
    batch = {"x": jnp.ones((4, 3)), "row": jnp.arange(4), "mask": jnp.ones(4, bool)}
    program = jax.make_jaxpr(make_step(squares, built))(state, batch)
    conds = lambda eqns: [e.params["branches"] for e in eqns if e.primitive.name == "cond"]
    (platforms,) = conds(program.eqns)
    (branches,) = [found for platform in platforms for found in conds(platform.jaxpr.eqns)]
    assert sum(str(branch).count("reduce_sum") for branch in branches) == sums


@pytest.mark.thorough
def test_no_collective_is_in_a_branch_on_eight_devices():
    parts = set_up(config("clips", parallel=FSDP(devices=8, min_size=0)))
    program = HloProgram(parts.lower_step().compile().as_text())
    operations = [instruction.operation for instruction, *_ in program.walk()]
    assert [name for name in operations if "all-" in name], "there is what to send"
    assert "conditional" not in operations
