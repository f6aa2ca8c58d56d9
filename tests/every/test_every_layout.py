"""Every model under every strategy takes the steps of one device. A new model is a new row.

Models, strategies and microbatches are crossed pairwise; rows are hidden here and there. What makes
rows meet is laid out by name alone, as its `couples` says. The whole matrix is slow.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import STRATEGIES, strategy

import jtrain as jt
from jtrain.core import pytree
from jtrain.core.state import TrainState
from jtrain.core.types import Couples
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.cnn import CNN
from jtrain.models.mlp import MLP
from jtrain.models.resnet import ResNet
from jtrain.models.transformer import Transformer
from jtrain.models.vit import ViT

ROWS, STEPS, DEVICES = 16, 3, 4
IMAGE: dict[str, Any] = {"image": (6, 6, 2), "classes": 5, "dropout": 0.2}
RESNET: dict[str, Any] = {**IMAGE, "blocks": (1, 1), "width": 8, "stem": "cifar"}
MEMBERS = {
    "transformer": Transformer(vocab=11, context=6, layers=1, heads=2, width=16, dropout=0.2),
    "mlp": MLP(inputs=72, widths=(16,), classes=5, dropout=0.2),
    "cnn": CNN(**IMAGE, channels=(8, 16)),
    "resnet": ResNet(**RESNET),
    "resnet, group norm": ResNet(**RESNET, norm="group", groups=4),
    "vit": ViT(**IMAGE, patch=3, layers=1, heads=2, width=16),
}
BY_NAME = ("single", "mirrored jit", "fsdp")
# Rounding of sums in another order; it grows in three steps, and most where statistics divide.
LOSS, PARAMS = 1e-6, 2e-6


class Case(NamedTuple):
    """A model under a strategy."""

    member: str
    strategy: str
    microbatches: int


def couples(member: str) -> Couples:
    return getattr(MEMBERS[member], "couples", "nothing")


def allowed(case: Case) -> bool:
    if case.strategy == "single" and case.microbatches == 1:
        return False  # that is what the others are compared with
    whole = case.strategy in BY_NAME and case.microbatches == 1
    return couples(case.member) == "nothing" or whole


MATRIX = [
    case
    for case in map(Case, *zip(*itertools.product(MEMBERS, STRATEGIES, (1, 2)), strict=True))
    if allowed(case)
]
QUICK = [
    Case("resnet", "mirrored jit", 1),
    Case("resnet", "fsdp", 1),
    Case("cnn", "mirrored shard_map", 2),
    Case("vit", "mirrored pmap", 1),
    Case("resnet, group norm", "single", 2),
    Case("transformer", "fsdp", 2),
    Case("mlp", "mirrored shard_map", 1),
]
assert set(QUICK) <= set(MATRIX)
CASES = [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in MATRIX]


def batch_of(member: str, step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    rows = {"row": np.arange(ROWS, dtype=np.int32), "mask": draw.random(ROWS) < 0.7}
    if member == "transformer":
        length = draw.integers(1, 7, ROWS).astype(np.int32)
        return {
            **rows,
            "tokens": draw.integers(0, 11, (ROWS, 7)).astype(np.int32),
            "length": length,
        }
    image = draw.standard_normal((ROWS, 6, 6, 2)).astype(np.float32)
    return {**rows, "image": image, "label": draw.integers(0, 5, ROWS).astype(np.int32)}


@functools.cache
def loss_of(member: str, place: Any):
    values = MEMBERS[member]
    model = values.build(place)

    def text(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, rng=jt.row_keys(rng, batch))
        return next_token(logits, targets, real)

    def images(params, extra, batch, rng):
        keys, masked = jt.row_keys(rng, batch), {} if member == "mlp" else {"mask": batch["mask"]}
        logits, extra = model.apply(params, extra, batch["image"], rng=keys, **masked)
        return *cross_entropy(logits, batch["label"], batch["mask"]), extra

    return text if member == "transformer" else jt.stateful(images)


OPTIMIZER = optax.sgd(0.1)


@functools.cache
def start(member: str) -> TrainState:
    """On the host; parameters by numpy, which compiles nothing."""
    shapes, extra = jax.eval_shape(MEMBERS[member].build().init, jax.random.key(0))
    draw = np.random.default_rng(0)

    def normal(path, leaf):
        name = pytree.name(path)
        level = 1.0 if name.endswith("scale") else 0.0
        return draw.normal(level, 0.2, leaf.shape).astype(leaf.dtype)

    params = jax.tree_util.tree_map_with_path(normal, shapes)
    at = lambda path, leaf: np.full(leaf.shape, pytree.name(path).endswith("var"), leaf.dtype)
    extra = jax.tree_util.tree_map_with_path(at, extra)
    return jax.device_get(jt.new_state(params, OPTIMIZER, jax.random.key(1), extra))


@functools.cache
def walked(case: Case) -> tuple[np.ndarray, TrainState]:
    """Losses and the state after STEPS steps; microbatches of convolutions are written out."""
    where = strategy(case.strategy, 1 if case.strategy == "single" else DEVICES)
    step = jt.make_step(
        loss_of(case.member, where.placement),
        OPTIMIZER,
        microbatches=case.microbatches,
        couples=couples(case.member),
        psum=where.psum,
        ragged=True,
        unroll=True,
    )
    batches = [batch_of(case.member, i) for i in range(STEPS)]
    program = where.compile(step, start(case.member), where.place(batches[0]), keeps=True)
    state = jax.device_put(start(case.member), where.shardings(start(case.member)))
    losses = []
    for batch in batches:
        state, metrics = program(state, where.place(batch))
        losses.append(metrics["loss"].value())
    return np.array(losses), jax.device_get(state)


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_takes_the_steps_of_one_device(case):
    (losses, state), (want, one) = walked(case), walked(Case(case.member, "single", 1))
    assert_close(losses, want, LOSS)
    assert distance(state.params, one.params) <= PARAMS
    assert distance(one.params, start(case.member).params) > 1e-3, "nothing was learned"
    if jax.tree.leaves(one.extra):
        assert distance(state.extra, one.extra) <= PARAMS
        assert distance(one.extra, start(case.member).extra) > 1e-3, "no statistic moved"


@pytest.mark.parametrize("member", [name for name in MEMBERS if couples(name) == "batch"])
def test_what_makes_rows_meet_is_not_split(member):
    loss = loss_of(member, strategy("single", 1).placement)
    for split in ({"microbatches": 2}, {"psum": lambda tree: tree}):
        with pytest.raises(LossError, match="couples the rows of a batch"):
            jt.make_step(loss, OPTIMIZER, couples=couples(member), **split)
