"""Losses and optimizers that keep no contract: refused, with what to write instead."""
# ruff: noqa: E501  (a case reads best on few lines)

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pydantic
import pytest
from line import height, line, points, squared, start

from jtrain.core.accumulate import accumulate
from jtrain.core.loss import normalize_loss, stateful
from jtrain.core.loss_checks import check_unused_params
from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.core.types import Dims
from jtrain.errors import ConfigError, LossError
from jtrain.optim import Optimizer
from jtrain.parallel import FSDP, Mirrored, Single, check_divides

SGD = optax.sgd(0.1)


def errors(params, batch):
    return jnp.square(height(params, batch) - batch["y"])  # b


def good(params, batch, rng):
    return squared(params, batch, rng)


def weighed(weight: Callable[[Any, Any], Any]):
    """Return a loss whose weight is computed from (params, batch)."""

    def loss(params, batch, rng):
        del rng
        return Mean(errors(params, batch).sum(), weight(params, batch))

    return loss


def by_carry_later(params, batch):
    """Run a scan whose second carry depends on the parameter only in the second round."""
    swap = lambda both, _: ((height(params, batch).sum(), both[0]), None)
    return jax.lax.scan(swap, (jnp.float32(0), jnp.float32(0)), None, length=2)[0][1]


def carried(change: Callable[[Any, Any], Any]):
    return stateful(lambda p, e, b, rng: (squared(p, b, rng), {}, change(e, b)))


def with_metric(metric: Any, name: str = "accuracy"):
    return lambda p, b, rng: (squared(p, b, rng), {name: metric(p, b)})


@dataclasses.dataclass(frozen=True)
class Case:
    loss: Any
    advice: str
    """What the message has to say."""
    instead: Any = good
    """What following it gives, which has to work."""
    ragged: bool = False
    extra: Any = ()


EXTRA = {"mean": jnp.float32(0), "teacher": jnp.float32(1)}
kept = carried(lambda e, b: {"mean": Mean.of(b["x"].sum(-1), b["mask"]), "teacher": e["teacher"]})
scalar = lambda p, b, rng: errors(p, b).mean()
weight_advice = "A weight may depend on the batch alone"
CASES = {
    "returns a number": Case(lambda p, b, rng: 0.5, "a float; it must return a jt.Mean"),
    "returns a value a row": Case(lambda p, b, rng: errors(p, b), 'jt.Mean.of(values, batch["mask"])'),
    "totals a row": Case(lambda p, b, rng: Mean(errors(p, b), b["mask"].astype(jnp.float32)),
        "has a total of shape (8,) and a weight of shape (8,); both must be sums over rows",
        lambda p, b, rng: Mean((errors(p, b) * b["mask"]).sum(), b["mask"].sum(dtype=jnp.float32))),
    "a scalar over ragged data": Case(scalar, 'Return a Mean instead: `jt.Mean.of(values_by_row, batch["mask"])`', lambda p, b,
        rng: Mean.of(errors(p, b), b["mask"]), ragged=True),
    "a metric that is not a Mean": Case(with_metric(lambda p, b: errors(p, b).max()),
        "the metric 'accuracy' is an array float32[], not a Mean", with_metric(lambda p,
        b: Mean.of(errors(p, b), b["mask"]))),
    "a metric named as the step's own": Case(with_metric(lambda p, b: Mean.of(errors(p, b), b["mask"]), "grad_norm"),
        "the metric 'grad_norm' has the name of one that the step adds; rename it",
        with_metric(lambda p, b: Mean.of(errors(p, b), b["mask"]), "my_norm")),
    "a weight of parameters": Case(weighed(lambda p, b: height(p, b).sum()), weight_advice),
    "a weight of parameters behind stop_gradient": Case(weighed(lambda p, b: jax.lax.stop_gradient(height(p, b)).sum()), weight_advice),
    "a weight of parameters in a scan's second round": Case(weighed(by_carry_later), weight_advice),
    "the weight of the second term of parameters": Case(lambda p, b, rng: squared(p, b, rng) + 0.1 * weighed(lambda p, b: p["offset"])(p, b, rng),
        "the weight of term 1 of the loss is computed from the parameter 'offset'", lambda p, b,
        rng: squared(p, b, rng) + 0.1 * squared(p, b, rng)),
    "a stateful loss without state": Case(stateful(lambda p, e, b, rng: squared(p, b, rng)),
        "must return (value, metrics, extra) and returned a Mean", kept, extra=EXTRA),
    "state that changes but is not a Mean": Case(carried(lambda e, b: e | {"mean": b["x"].mean()}),
        "the leaf 'mean' of `extra` changes but is not a Mean. Return `jt.Mean(new * rows, rows)`",
        carried(lambda e, b: e | {"mean": Mean(b["x"].mean() * 8, jnp.float32(8))}), extra=EXTRA),
    "state of another structure": Case(carried(lambda e, b: {"mean": e["mean"]}),
        "an `extra` of another structure: ['mean'], and was given ['mean', 'teacher']", kept,
        extra=EXTRA),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_is_refused_with_advice_that_works(case, microbatches):
    make = lambda: new_state(line(), SGD, jax.random.key(0), case.extra)
    options = {"microbatches": microbatches, "ragged": case.ragged}
    batch = points(8 * microbatches)
    with pytest.raises(LossError) as caught:
        jax.eval_shape(make_step(case.loss, SGD, **options), jax.eval_shape(make), batch)
    assert case.advice in str(caught.value)
    jax.eval_shape(make_step(case.instead, SGD, **options), jax.eval_shape(make), batch)


@pytest.mark.parametrize(
    ("where", "microbatches", "said"),
    [
        (Single(), 2, "2 microbatches would cut the batch"),
        (Mirrored(devices=2, impl="shard_map"), 1, "separate copies of the step would cut"),
        (Mirrored(devices=2, impl="pmap"), 1, "separate copies of the step would cut"),
    ],
    ids=repr,
)
def test_rows_that_meet_are_not_parted(where, microbatches, said):
    psum = where.build().psum
    with pytest.raises(LossError) as caught:
        make_step(squared, SGD, rows_interact="batch", microbatches=microbatches, psum=psum)
    assert said in str(caught.value)
    assert "microbatches=1" in str(caught.value)
    assert 'rows_interact="slice"' in str(caught.value)
    for named in (Single(), FSDP(devices=2), Mirrored(devices=2, impl="jit")):
        make_step(squared, SGD, rows_interact="batch", psum=named.build().psum)
    make_step(squared, SGD, rows_interact="slice", microbatches=2)


def test_a_parameter_without_gradient_is_named():
    params = line() | {"spare": {"kernel": jnp.ones(3)}, "aside": jnp.ones(2)}
    of = lambda loss: lambda params: normalize_loss(loss)(params, (), points(), None)
    with pytest.raises(LossError) as caught:
        check_unused_params(of(good), params)
    assert "not computed from the parameters 'aside', 'spare/kernel'" in str(caught.value)
    assert "take them out of the model, or hold them in `extra`" in str(caught.value)
    check_unused_params(of(good), line())
    uses = lambda p, b, rng: (
        good(p, b, rng) + Mean(p["spare"]["kernel"].sum() + p["aside"].sum(), jnp.float32(1))
    )
    check_unused_params(of(uses), params)


def test_copies_of_a_step_need_to_know_their_rows():
    batch = points(8)
    del batch["row"]
    step = make_step(squared, SGD, psum=lambda tree: tree)
    with pytest.raises(LossError, match=r"no `row` or no `mask`[\s\S]*on the host"):
        jax.eval_shape(step, start(SGD), batch)
    jax.eval_shape(step, start(SGD), points(8))


@pytest.mark.parametrize(
    ("batch", "shares", "microbatches", "nearest", "follow"),
    [
        (30, 4, 2, "Nearest: 24 or 32 (batch=24)", 24),
        (3, 4, 1, "Nearest: 4 (batch=4)", 4),
        (6, 4, 2, "Nearest: 8 (batch=8)", 8),  # a microbatch has 3 rows for 4 devices
        (9, 1, 2, "Nearest: 8 or 10 (batch=8)", 8),
    ],
)
def test_rows_that_do_not_divide_name_the_nearest_sizes(
    batch, shares, microbatches, nearest, follow
):
    with pytest.raises(ConfigError) as caught:
        check_divides(batch, shares, microbatches)
    assert nearest in str(caught.value)
    assert f"{shares} devices x {microbatches} microbatches" in str(caught.value)
    check_divides(follow, shares, microbatches)


def test_microbatches_that_do_not_divide_name_the_nearest_sizes():
    rows = lambda batch: {"rows": jnp.float32(len(batch["x"]))}
    accumulate_rows = lambda size: jax.jit(accumulate(rows, 3))(points(size))["rows"]
    with pytest.raises(ConfigError, match=r"3 microbatches do not divide the 8 rows.*6 or 9 rows"):
        accumulate_rows(8)
    assert accumulate_rows(9) == 9
    assert accumulate_rows(6) == 6


PARAMS = {
    "embed": {"table": jnp.zeros((4, 2))},
    "head": {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)},
}


class OptimizerCase(NamedTuple):
    """Values of an optimizer, what is said of them, and the values that the advice leads to."""

    wrong: dict[str, Any]
    said: list[str]
    right: dict[str, Any]
    dims: Mapping[str, Dims] = MappingProxyType({})


def cosine(warmup: int) -> dict[str, Any]:
    return {"schedule": {"kind": "cosine", "warmup": warmup}}


OPTIMIZERS = {
    "warmup is the whole run": OptimizerCase(cosine(warmup=100), ["warmup 100 is the whole run of 100 steps",
        "lower optimizer.schedule.warmup (optimizer.schedule.warmup=10)",
        "raise steps (steps=1000)",], cosine(warmup=10)),
    "nesterov without momentum": OptimizerCase({"kind": "sgd", "nesterov": True},
        ["nesterov looks ahead along the momentum, which is 0", "optimizer.momentum=0.9"],
        {"kind": "sgd", "nesterov": True, "momentum": 0.9}),
    "a group of nothing": OptimizerCase({"groups": [{"match": "*/embedding/*", "lr_factor": 0.1}]},
        ["optimizer.groups[0].match is '*/embedding/*', which matches none of the 3 leaves",
        "Nearest: embed/table,", "Write one ('embed/table')",], {"groups": [{"match": "embed/table",
        "lr_factor": 0.1}]}),
    "a group that another holds": OptimizerCase({"groups": [{"match": "head/*", "lr_factor": 2}, {"match": "*/b",
        "lr_factor": 3}]}, ["optimizer.groups[1] (*/b) has no leaf", "move it up, before head/*"],
        {"groups": [{"match": "*/b", "lr_factor": 3}, {"match": "head/*", "lr_factor": 2}]}),
    "factors over the layers of a stack": OptimizerCase({"kind": "adafactor", "factor_from": 2},
        ["optimizer.factor_from=2 factors head/w [2, 2] over its 2 layers",
        "Set optimizer.factor_from=3",], {"kind": "adafactor", "factor_from": 3},
        dims={"head/w": ("layers", None)}),
    "everything frozen": OptimizerCase({"groups": [{"match": "*", "freeze": True}]}, ["freezes all 3 leaves",
        "narrow a match, or set freeze: false"], {"groups": [{"match": "embed/*",
        "freeze": True}]}),
}  # fmt: skip


def use(typed: dict[str, Any], dims: Mapping[str, Dims]) -> None:
    """Take a config through its stages: values, transformation of 100 steps, first step."""
    values = pydantic.TypeAdapter(Optimizer).validate_python({"kind": "adamw", "lr": 0.1, **typed})
    optimizer = values.build(100, dims)
    optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.thorough
@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_refused_optimizer_says_what_works(case: OptimizerCase):
    with pytest.raises((ConfigError, pydantic.ValidationError)) as refusal:
        use(case.wrong, case.dims)
    for words in case.said:
        assert words in str(refusal.value)
    use(case.right, case.dims)
