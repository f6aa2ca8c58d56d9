"""Errors in optimizer configs: the message, and that its advice works."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import pydantic
import pytest

from jtrain.core.types import Dims
from jtrain.errors import ConfigError
from jtrain.optim import Optimizer

PARAMS = {
    "embed": {"table": jnp.zeros((4, 2))},
    "head": {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)},
}


class Case(NamedTuple):
    """Values of an optimizer, what is said of them, and the values that the advice leads to."""

    wrong: dict[str, Any]
    said: list[str]
    right: dict[str, Any]
    steps: int = 100
    right_steps: int = 100
    dims: Mapping[str, Dims] = MappingProxyType({})


def schedule(kind: str = "cosine", **values: Any) -> dict[str, Any]:
    return {"schedule": {"kind": kind, **values}}


CASES = {
    "warmup is the whole run": Case(
        schedule(warmup=100),
        [
            "warmup 100 is the whole run of 100 steps",
            "lower optimizer.schedule.warmup (optimizer.schedule.warmup=10)",
            "raise steps (steps=1000)",
        ],
        schedule(warmup=10),
    ),
    "warmup longer than the run, more steps": Case(
        schedule("wsd", warmup=150),
        ["warmup 150 is longer than the run of 100 steps", "raise steps (steps=1500)"],
        schedule("wsd", warmup=150),
        right_steps=1500,
    ),
    "no steps": Case({}, ["steps is 0", "set steps=1"], {}, steps=0, right_steps=1),
    "nesterov without momentum": Case(
        {"kind": "sgd", "nesterov": True},
        ["nesterov looks ahead along the momentum, which is 0", "optimizer.momentum=0.9"],
        {"kind": "sgd", "nesterov": True, "momentum": 0.9},
    ),
    "nesterov without momentum, the other way": Case(
        {"kind": "sgd", "nesterov": True},
        ["optimizer.nesterov=false"],
        {"kind": "sgd", "nesterov": False},
    ),
    "a group of nothing": Case(
        {"groups": [{"match": "*/embedding/*", "lr_factor": 0.1}]},
        [
            "optimizer.groups[0].match is '*/embedding/*', which matches none of the 3 leaves",
            "Nearest: embed/table,",
            "Write one ('embed/table')",
        ],
        {"groups": [{"match": "embed/table", "lr_factor": 0.1}]},
    ),
    "a decay of nothing": Case(
        {"decay": ["*/w", "head/c"]},
        ["optimizer.decay[1] is 'head/c'", "Nearest: head/"],
        {"decay": ["*/w", "head/b"]},
    ),
    "a group that another holds": Case(
        {"groups": [{"match": "head/*", "lr_factor": 2}, {"match": "*/b", "lr_factor": 3}]},
        ["optimizer.groups[1] (*/b) has no leaf", "move it up, before head/*"],
        {"groups": [{"match": "*/b", "lr_factor": 3}, {"match": "head/*", "lr_factor": 2}]},
    ),
    "factors over the layers of a stack": Case(
        {"kind": "adafactor", "factor_from": 2},
        [
            "optimizer.factor_from=2 factors head/w [2, 2] over its 2 layers",
            "Set optimizer.factor_from=3",
        ],
        {"kind": "adafactor", "factor_from": 3},
        dims={"head/w": ("layers", None)},
    ),
    "everything frozen": Case(
        {"groups": [{"match": "*", "freeze": True}]},
        ["freezes all 3 leaves", "narrow a match, or set freeze: false"],
        {"groups": [{"match": "embed/*", "freeze": True}]},
    ),
    "a learning rate of zero": Case({"lr": 0}, ["lr", "greater than 0"], {"lr": 1e-9}),
    "a learning rate that is no number": Case(
        {"lr": float("nan")}, ["lr", "finite number"], {"lr": 1e-9}
    ),
    "a share above one": Case(
        schedule(final=1.5), ["final", "less than or equal to 1"], schedule()
    ),
    "an unknown schedule": Case(
        schedule("cosin"), ["'constant', 'linear', 'cosine', 'wsd'"], schedule("cosine")
    ),
    "a key that the schedule lacks": Case(
        schedule("constant", final=0.1), ["final", "Unexpected keyword"], schedule("constant")
    ),
    "momentum of one": Case(
        {"kind": "sgd", "momentum": 1.0},
        ["momentum", "less than 1"],
        {"kind": "sgd", "momentum": 0.9},
    ),
    "an unknown kind": Case({"kind": "adamx"}, ["'sgd', 'adam', 'adamw'"], {"kind": "adam"}),
}


def use(typed: dict[str, Any], steps: int, dims: Mapping[str, Dims]) -> None:
    """Take a config through its stages: values, transformation, first step."""
    values = pydantic.TypeAdapter(Optimizer).validate_python({"kind": "adamw", "lr": 0.1, **typed})
    optimizer = values.build(steps, dims)
    optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_says_what_is_wrong_and_its_advice_works(case: Case):
    with pytest.raises((ConfigError, pydantic.ValidationError)) as refusal:
        use(case.wrong, case.steps, case.dims)
    for words in case.said:
        assert words in str(refusal.value)
    use(case.right, case.right_steps, case.dims)
