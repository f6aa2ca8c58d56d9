"""What holds for every model, and that it takes one device's steps under every strategy.

A new member is a new row of MEMBERS. What makes rows meet is laid out by name alone, as its
`rows_interact` says.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name
from comparison import assert_close, bitwise, distance
from layouts import EXPLICIT, STRATEGIES, strategy

import jtrain as jt
from jtrain.core.pytree import describe, named_leaves
from jtrain.core.rows import row_keys
from jtrain.core.state import TrainState
from jtrain.core.types import RowsInteract
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.next_token import next_token
from jtrain.models.classifiers import CNN, MLP, EfficientNetLite, ResNet, ViT
from jtrain.models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("strict_dtypes")
NAMES = Path(__file__).parents[1] / "golden" / "parameter_names.txt"
ROWS = 8
DRAW = np.random.default_rng(0)


def _next_token(logits, targets, mask):
    return next_token(logits, targets, jnp.broadcast_to(mask[:, None], targets.shape))


_class = cross_entropy


class Row(NamedTuple):
    """A small member, what goes in, what should come out, and what it is judged by."""

    values: Any
    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable
    outputs: tuple[int, ...]
    name: str = ""


def _tokens(*shape: int) -> np.ndarray:
    return DRAW.integers(0, 11, shape).astype(np.int32)


TEXT = {"loss": _next_token, "inputs": _tokens(ROWS, 6), "targets": _tokens(ROWS, 6)}
SMALL = {"vocab": 11, "context": 6, "layers": 1, "heads": 2, "width": 16, "dropout": 0.2}
IMAGES: Any = {
    "inputs": DRAW.standard_normal((ROWS, 6, 6, 2)).astype(np.float32),
    "targets": DRAW.integers(0, 5, ROWS).astype(np.int32),
    "loss": _class,
    "outputs": (ROWS, 5),
}
IMAGE = {"image": (6, 6, 2), "classes": 5, "dropout": 0.2}


MEMBERS = {
    "transformer": Row(Transformer(**SMALL), outputs=(ROWS, 6, 11), **TEXT),
    "transformer, free head, no bias": Row(
        Transformer(**SMALL, tied=False, bias=False), outputs=(ROWS, 6, 11), **TEXT
    ),
    **{
        f"transformer, {kind} experts": Row(
            Transformer(**SMALL, bias=False, experts={"kind": kind, "count": 3}),
            outputs=(ROWS, 6, 11),
            **TEXT,
        )
        for kind in ("dropless", "capacity")
    },
    "mlp": Row(
        MLP(inputs=12, widths=(32, 16), classes=5, dropout=0.2),
        inputs=DRAW.standard_normal((ROWS, 3, 4)).astype(np.float32),
        targets=DRAW.integers(0, 5, ROWS).astype(np.int32),
        loss=_class,
        outputs=(ROWS, 5),
    ),
    "cnn": Row(CNN(**IMAGE, channels=(8, 16), widths=(16,)), **IMAGES),
    "resnet": Row(ResNet(**IMAGE, blocks=(1,), width=16, bottleneck=True), **IMAGES),
    "resnet, group norm, small images": Row(
        ResNet(**IMAGE, blocks=(1,), width=16, norm="group", groups=4, stem="cifar"), **IMAGES
    ),
    "efficientnet lite": Row(
        EfficientNetLite(**IMAGE, stem=16, widths=(8,) * 7, blocks=(1,) * 7, features=16), **IMAGES
    ),
    "vit": Row(ViT(**IMAGE, patch=3, layers=1, heads=2, width=16), **IMAGES),
}


def rows_interact(name: str) -> RowsInteract:
    return getattr(MEMBERS[name].values, "rows_interact", "never")


LONG = {
    "transformer, dropless experts",
    "transformer, free head, no bias",
    "transformer, capacity experts",
    "resnet, group norm, small images",
    "efficientnet lite",
}


@pytest.fixture(
    params=by_name(list(MEMBERS), MEMBERS.keys() - LONG, pytest.mark.thorough), name="row"
)
def _row(request) -> Row:
    row, name = MEMBERS[request.param], request.param
    return row._replace(inputs=jnp.asarray(row.inputs), targets=jnp.asarray(row.targets), name=name)


@functools.cache
def _built(values):
    model = values.build()
    init = jax.jit(model.init)
    params, extra = init(jax.random.key(0))
    return init, (jax.jit(model.apply, static_argnames="train"), params, extra)


def ready(row: Row):
    return _built(row.values)[1]


def keys_of(rows) -> jax.Array:
    return row_keys(jax.random.key(7), {"row": jnp.asarray(rows, jnp.int32)})


@pytest.mark.thorough
def test_names_its_parameters_as_ever_and_gives_logits(row):
    apply, params, extra = ready(row)
    line = f"{row.name}: {' '.join(sorted(named_leaves(params)))}"
    assert line in NAMES.read_text().splitlines(), f"if it was meant, the line of {NAMES}: {line}"
    assert set(describe(params).values()) >= {"float32[16]"}
    outputs, _ = apply(params, extra, row.inputs)
    assert (outputs.shape, outputs.dtype) == (row.outputs, jnp.float32)
    assert jnp.isfinite(outputs).all()
    before = {id(x) for x in jax.live_arrays()}
    assert row.values.build().init
    assert not [x for x in jax.live_arrays() if id(x) not in before], "building makes no array"


@pytest.mark.thorough
def test_computes_in_the_dtype_of_its_parameters(row):
    apply, params, extra = ready(row)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    outputs, _ = apply(half, extra, row.inputs)
    exact, _ = apply(params, extra, row.inputs)
    assert outputs.dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits; a few layers of it stay within some of its steps.
    assert_close(outputs.astype(jnp.float32), exact, 0.05)


@pytest.mark.sampled(3)
def test_init_depends_on_the_key_alone(row):
    init, _ = _built(row.values)
    first, again, other = (init(jax.random.key(k))[0] for k in (3, 3, 4))
    assert bitwise(first, again)
    assert not bitwise(first, other)


@pytest.mark.sampled(3)
def test_rows_drop_by_their_own_keys_and_meet_only_where_it_says_so(row):
    apply, params, extra = ready(row)
    run = lambda rows, keys: apply(params, extra, row.inputs[rows], rng=keys_of(keys))[0]
    every = np.arange(ROWS)
    whole = run(every, every)
    kept, _ = apply(params, extra, row.inputs, rng=keys_of(every), train=False)
    assert np.abs(whole - kept).max() > 1e-3, "nothing was dropped"
    # Of equal rows alone batch norm makes zeros.
    alike = run(np.array([0, 0, 0, 0, *range(4, ROWS)]), every)
    assert np.abs(alike[1:4] - alike[:1]).max() > 1e-3, "rows drop alike"
    meets = np.abs(run(np.array([0, 1, *[7] * 6]), every) - whole)[:2].max() > 1e-3
    assert meets == (getattr(row.values, "rows_interact", "never") == "batch")
    if not meets:
        order = np.array([5, 2, 7, 0, 1, 4, 3, 6])
        assert_close(run(order, order), whole[order], 1e-5)


@pytest.mark.sampled(3)
def test_training_with_dropout_and_no_keys_is_refused(row):
    apply, params, extra = ready(row)
    with pytest.raises(ValueError, match=r"dropout=0\.2 and got no keys.*row_keys\(rng, batch\)"):
        apply(params, extra, row.inputs, train=True)


@pytest.mark.thorough
def test_every_parameter_gets_a_gradient(row):
    apply, params, extra = ready(row)
    seen = jnp.ones(ROWS, bool)
    total = lambda p: row.loss(apply(p, extra, row.inputs)[0], row.targets, seen)[0].total
    for name, grad in named_leaves(jax.jit(jax.grad(total))(params)).items():
        assert jnp.isfinite(grad).all(), name
        assert jnp.abs(grad).max() > 0, name


# Each model under a strategy of its own, so that all are met; the whole matrix is slow. Experts
# have their own axis (test_every_axis.py).
STEPS, OPTIMIZER = 3, optax.sgd(0.03)
SPLITS = {
    "transformer": ("fsdp", 2),
    "transformer, free head, no bias": ("mirrored jit", 2),
    "mlp": ("mirrored shard_map", 1),
    "cnn": ("mirrored shard_map", 2),
    "resnet": ("fsdp", 1),
    "resnet, group norm, small images": ("single", 2),
    "efficientnet lite": ("mirrored jit", 1),
    "vit": ("mirrored pmap", 1),
}
JOINED = ("mirrored jit", "fsdp", *EXPLICIT)  # one program, in which all rows meet
CASES = [
    pytest.param(
        *(name, layout, count),
        marks=pytest.mark.thorough if (layout, count) == SPLITS[name] else pytest.mark.slow,
    )
    for name in SPLITS
    for layout in [*STRATEGIES, *EXPLICIT]
    for count in (1, 2)
    if (layout, count) != ("single", 1) and (count == 1 or layout not in EXPLICIT)
    if rows_interact(name) == "never" or (layout in JOINED and count == 1)
]


@functools.cache
def loss_of(name: str, place: Any):
    row = MEMBERS[name]
    model = row.values.build(place)

    def loss(params, extra, batch, rng):
        hides = name != "mlp" and "transformer" not in name
        masked = {"mask": batch["mask"]} if hides else {}
        keys = row_keys(rng, batch)
        outputs, extra = model.apply(params, extra, batch["inputs"], rng=keys, **masked)
        return *row.loss(outputs, batch["targets"], batch["mask"]), extra

    return jt.stateful(loss)


@functools.cache
def walked(name: str, layout: str, microbatches: int) -> tuple[np.ndarray, TrainState, TrainState]:
    """Losses and states before and after STEPS steps with rows hidden."""
    where = strategy(layout, 1 if layout == "single" else 4)
    _, params, extra = ready(MEMBERS[name])
    begin = jax.device_get(jt.new_state(params, OPTIMIZER, jax.random.key(1), extra))
    how = {"microbatches": microbatches, "rows_interact": rows_interact(name), "psum": where.psum}
    step = jt.make_step(
        where.loss(loss_of(name, where.placement)), OPTIMIZER, **how, ragged=True, unroll=True
    )
    row, every = MEMBERS[name], np.arange(ROWS, dtype=np.int32)
    batch = {"inputs": row.inputs, "targets": row.targets, "row": every}
    # A third step divides by the statistics of few values: rounding grows a hundredfold.
    steps = STEPS if rows_interact(name) == "never" else 2
    batches = [where.place({**batch, "mask": every != i}) for i in range(steps)]
    program = where.compile(step, begin, batches[0], returns_state=True)
    state, losses = jax.device_put(begin, where.shardings(begin)), []
    for batch in batches:
        state, metrics = program(state, batch)
        losses.append(metrics["loss"].value())
    return np.array(losses), begin, jax.device_get(state)


@pytest.mark.parametrize(("name", "layout", "microbatches"), CASES)
def test_takes_the_steps_of_one_device(name, layout, microbatches):
    with jax.numpy_dtype_promotion("standard"):  # the steps and optax promote by themselves
        losses, _, state = walked(name, layout, microbatches)
        want, begin, one = walked(name, "single", 1)
    # Rounding of sums in another order; it grows in three steps, most where statistics divide.
    assert_close(losses, want, 1e-6)
    assert distance(state.params, one.params) <= 2e-6
    assert distance(one.params, begin.params) > 1e-3, "nothing was learned"
    if jax.tree.leaves(one.extra):
        assert distance(state.extra, one.extra) <= 2e-6
        assert distance(one.extra, begin.extra) > 1e-3, "no statistic moved"
