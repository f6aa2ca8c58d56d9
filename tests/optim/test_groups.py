"""Groups of parameters, found by their names, and gradients clipped by a norm."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

from chaos.numbers import config
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.optim import ParamGroup
from jtrain.optim.groups import group_of, matches
from jtrain.optim.transformations import clip_by_norm
from jtrain.parallel import FSDP
from jtrain.train.program import set_up

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
