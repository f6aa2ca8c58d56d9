"""What holds for a small network of every framework. A new framework is a new row of MEMBERS."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise, distance
from flax import nnx
from layouts import STRATEGIES, strategy

import jtrain as jt
from jtrain.core.loss import normalize_loss
from jtrain.core.loss_checks import check_product_precision
from jtrain.core.precision.cast import compute_in
from jtrain.core.pytree import describe
from jtrain.core.state import TrainState
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.adapters import from_function, mean_of_slices
from jtrain.models.adapters.libraries import from_equinox, from_haiku, from_linen
from jtrain.models.adapters.nnx import from_nnx

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")
ROWS, STEPS, DECAY, RATE, EPSILON = 16, 5, 0.9, 0.5, 1e-3
KINDS = ("plain", "dropout", "batch norm")
SHAPES = (jax.ShapeDtypeStruct((ROWS, 6), jnp.float32), jax.ShapeDtypeStruct((ROWS,), bool))


class Linen(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x, mask, train):
        x = nn.Dense(8)(x)
        if self.kind == "batch norm":
            norm = nn.BatchNorm(use_running_average=not train, momentum=DECAY, epsilon=EPSILON)
            x = norm(x, mask=mask[:, None])
        x = nn.relu(x)
        x = nn.Dropout(RATE, deterministic=not train)(x) if self.kind == "dropout" else x
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, kind, rngs):
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        if kind == "batch norm":
            self.norm = nnx.BatchNorm(8, momentum=DECAY, epsilon=EPSILON, rngs=rngs)
        self.drop = nnx.Dropout(RATE, rngs=rngs) if kind == "dropout" else lambda x: x

    def __call__(self, x, mask):
        x = self.up(x)
        if hasattr(self, "norm"):  # which gives the type of its statistics
            x = self.norm(x, mask=mask[:, None]).astype(x.dtype)
        return self.down(self.drop(jax.nn.relu(x)))


def haiku(kind):
    def net(x, mask, is_training):
        x = hk.Linear(8)(x)
        if kind == "batch norm":
            x = hk.BatchNorm(True, True, DECAY, eps=EPSILON)(x, is_training)
        x = jax.nn.relu(x)
        if kind == "dropout" and is_training:
            x = hk.dropout(hk.next_rng_key(), RATE, x)
        return hk.Linear(3)(x)

    return hk.transform_with_state(net) if kind == "batch norm" else hk.transform(net)


class Equinox(eqx.Module):
    up: eqx.nn.Linear
    norm: Any
    drop: eqx.nn.Dropout
    down: eqx.nn.Linear

    def __init__(self, kind, key):
        up, down = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(6, 8, key=up), eqx.nn.Linear(8, 3, key=down)
        norm = functools.partial(eqx.nn.BatchNorm, 8, "rows", EPSILON, momentum=DECAY, mode="ema")
        self.norm = norm() if kind == "batch norm" else None
        self.drop = eqx.nn.Dropout(RATE if kind == "dropout" else 0)

    def __call__(self, x, mask, state=None, *, key=None):
        x = self.up(x)
        if self.norm is not None:  # in float32, as its state is: it takes no other type
            y, state = self.norm(x.astype(jnp.float32), state)
            x = y.astype(x.dtype)
        x = self.down(self.drop(jax.nn.relu(x), key=key))
        return x if self.norm is None else (x, state)


def function(kind):
    def init(key):
        up, down = jax.random.split(key)
        params = {"up": jax.random.normal(up, (6, 8)) / 3, "down": jax.random.normal(down, (8, 3))}
        return (params, {"mean": jnp.zeros(8)}) if kind == "batch norm" else params

    def plain(params, x, mask):
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    def dropping(params, x, mask, rng, train):
        x = jax.nn.relu(x @ params["up"])
        keep = lambda key: jax.random.bernoulli(key, RATE, x.shape[1:])
        return (jnp.where(jax.vmap(keep)(rng), x / RATE, 0) if train else x) @ params["down"]

    def centred(params, x, mask, extra, train):
        x = x @ params["up"]
        mean = x.mean(0, where=mask[:, None]) if train else extra["mean"]
        new = DECAY * extra["mean"] + (1 - DECAY) * mean
        return jax.nn.relu(x - mean[None]) @ params["down"], {"mean": new} if train else extra

    return from_function(init, dict(zip(KINDS, (plain, dropping, centred), strict=True))[kind])


def equinox(kind):
    make = functools.partial(Equinox, kind)
    return from_equinox(eqx.nn.make_with_state(make) if kind == "batch norm" else make)


class Row(NamedTuple):
    """A framework: its network of a kind, who draws, and whether its batch norm takes a mask."""

    make: Callable[[str], jt.Model]
    by_row: bool
    masked: bool


MEMBERS = {
    "nnx": Row(lambda kind: from_nnx(lambda rngs: Nnx(kind, rngs)), by_row=False, masked=True),
    "linen": Row(lambda kind: from_linen(Linen(kind), *SHAPES), by_row=False, masked=True),
    "haiku": Row(lambda kind: from_haiku(haiku(kind), *SHAPES), by_row=False, masked=False),
    "equinox": Row(equinox, by_row=True, masked=False),
    "function": Row(function, by_row=True, masked=True),
}


@functools.cache
def model_of(name: str, kind: str) -> jt.Model:
    return MEMBERS[name].make(kind)


def batch_of(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    label = draw.integers(3, size=ROWS).astype(np.int32)
    x = (
        draw.standard_normal((ROWS, 6)).astype(np.float32)
        + 3 * np.eye(3, 6, dtype=np.float32)[label]
    )
    return {
        "x": x,
        "label": label,
        "row": np.arange(ROWS, dtype=np.int32),
        "mask": np.ones(ROWS, bool),
    }


@functools.cache
def loss_of(name: str, kind: str):
    model = model_of(name, kind)

    def loss(params, extra, batch, rng):
        keys = jt.row_keys(rng, batch)
        inputs = batch["x"].astype(jax.tree.leaves(params)[0].dtype), batch["mask"]
        logits, new = model.apply(params, extra, *inputs, rng=keys)
        mean, metrics = cross_entropy(logits, batch["label"], batch["mask"])
        return mean, metrics, mean_of_slices(extra, new, batch["mask"])

    return jt.stateful(loss)


class Walk(NamedTuple):
    losses: list[float]
    state: TrainState


OPTIMIZER = optax.sgd(0.3)


@functools.cache
def start(name: str, kind: str) -> TrainState:
    """The state before the first step, on the host; parameters by numpy, which compiles nothing."""
    model, key, draw = model_of(name, kind), jax.random.key(0), np.random.default_rng(0)
    shapes, _ = jax.eval_shape(model.init, key)
    normal = lambda leaf: draw.normal(0.5, 0.3, leaf.shape).astype(leaf.dtype)
    params, extra = jax.tree.map(normal, shapes), jax.jit(lambda key: model.init(key)[1])(key)
    return jax.device_get(jt.new_state(params, OPTIMIZER, jax.random.key(1), extra))


class Walker:
    """The step of a case, compiled once and walked as often as is wanted."""

    def __init__(self, name: str, kind: str, layout: str):
        self.strategy = strategy(layout, 1 if layout == "single" else 4)
        rows_interact = "batch" if kind == "batch norm" else "never"
        step = jt.make_step(
            loss_of(name, kind), OPTIMIZER, psum=self.strategy.psum, rows_interact=rows_interact
        )
        self.begin = start(name, kind)
        batch = self.strategy.place(batch_of(0))
        self.step = self.strategy.compile(step, self.begin, batch, returns_state=True)

    def walk(self) -> Walk:
        state = jax.device_put(self.begin, self.strategy.shardings(self.begin))
        losses = []
        for i in range(STEPS):
            state, metrics = self.step(state, self.strategy.place(batch_of(i)))
            losses.append(metrics["loss"].value())
        return Walk(losses, jax.device_get(state))


@functools.cache
def alone(name: str, kind: str) -> Walk:
    return Walker(name, kind, "single").walk()


# Each framework and each layout, dropout by row and by copy, batch norm by name; the rest is slow.
QUICK = [
    ("nnx", "batch norm", "mirrored jit"),
    ("linen", "dropout", "mirrored shard_map"),
    ("haiku", "batch norm", "fsdp"),
    ("equinox", "dropout", "mirrored shard_map"),
    ("function", "dropout", "mirrored pmap"),
]
MATRIX = [
    (name, kind, layout)
    for name in MEMBERS
    for kind in KINDS
    for layout in STRATEGIES[1:]
    if kind != "batch norm" or layout in ("mirrored jit", "fsdp")
]
CASES = [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in MATRIX]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind", "layout"), CASES)
def test_takes_the_same_steps_as_one_device(name, kind, layout):
    one, walker = alone(name, kind), Walker(name, kind, layout)
    many = walker.walk()
    copies = layout in ("mirrored shard_map", "mirrored pmap")
    if kind == "dropout" and copies and not MEMBERS[name].by_row:
        # Each copy draws one mask for its rows: another sample, and the same one at each run.
        assert bitwise(many.state, walker.walk().state)
        assert distance(many.state.params, one.state.params) > 1e-3
        return
    assert_close(many.losses, one.losses, 1e-5)
    assert distance(many.state.params, one.state.params) < 1e-5
    if kind == "batch norm":
        assert distance(many.state.extra, one.state.extra) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("name", MEMBERS)
def test_a_row_that_is_hidden_counts_in_no_statistics_or_is_refused(name):
    state, batch = start(name, "batch norm"), batch_of(0)
    if not MEMBERS[name].masked:
        loss = loss_of(name, "batch norm")
        step = jt.make_step(loss, OPTIMIZER, rows_interact="batch", ragged=True)
        with pytest.raises(LossError, match=r'rows that a mask hides. Leave.*end="drop"'):
            jax.eval_shape(step, state, batch)
        return
    apply = jax.jit(model_of(name, "batch norm").apply)
    seen = np.arange(ROWS) < 12
    key, junk = jax.random.key(0), np.where(seen[:, None], batch["x"], np.float32(1e3))
    of = lambda x, mask: apply(state.params, state.extra, x, mask, rng=key)
    (got, statistics), (want, expected) = of(junk, seen), of(batch["x"], seen)
    np.testing.assert_array_equal(got[:12], want[:12])
    assert bitwise(statistics, expected)
    assert not bitwise(statistics, of(batch["x"], np.ones(ROWS, bool))[1])


@pytest.mark.parametrize("name", MEMBERS)
def test_computes_in_bfloat16_and_keeps_its_statistics_as_they_are(name):
    state, batch = start(name, "batch norm"), batch_of(0)
    loss = compute_in(loss_of(name, "batch norm"), jnp.bfloat16)
    after, _ = jax.eval_shape(jt.make_step(loss, OPTIMIZER, rows_interact="batch"), state, batch)
    assert describe(after) == describe(state)
    key = jax.random.key(0)
    terms = lambda params: normalize_loss(loss)(params, state.extra, batch, key)
    narrow, products = check_product_precision(terms, state.params, jnp.bfloat16)
    assert narrow == products > 1
