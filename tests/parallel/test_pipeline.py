"""Layers in stages, and experts over a mesh, give what one device gives; what is refused."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import by_name
from comparison import assert_close, distance

from jtrain.core.placement import Unplaced
from jtrain.core.rows import row_keys
from jtrain.errors import ConfigError, ShardingError
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.experts import Capacity, Dropless
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.feed_forward import MixtureOfExperts
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes

LAYERS, B, T, D = 8, 16, 3, 4
WAYS: dict[str, dict[str, Any]] = {
    "gpipe": {"stage": 4, "data": 2},
    "more microbatches": {"stage": 2, "stage_batches": 4, "data": 2, "tensor": 2},
    "circular": {"stage": 2, "repeats": 4, "fsdp": 2, "data": 2},
    "circular, two groups": {"stage": 2, "repeats": 2, "stage_batches": 4, "fsdp": 2, "slice": 2},
    "circular, zero 1": {"stage": 4, "repeats": 2, "fsdp": 2, "zero": 1},
}
QUICK = {"more microbatches", "circular, two groups"}


def axes(**asked: Any) -> Axes:
    return Axes(**{"fsdp": 1, "devices": 8, **asked})


def layer(one, x, rows):
    """NaN, and so its gradient, unless all layers before were passed: what a bubble computes on."""
    weight, index = one
    rises = jnp.sqrt(x - index.astype(x.dtype) - 0.5) * weight[None, None]
    x = x + 1 + rises / 10 + rows["own"][:, None, None] / 100
    return x, {"sum": x.sum((1, 2)), "index": index + rows["number"]}


def given():
    draw = np.random.default_rng(0)
    stack = draw.uniform(0.1, 1, (LAYERS, D)).astype(np.float32), np.arange(LAYERS, dtype=np.int32)
    x = draw.uniform(1, 2, (B, T, D)).astype(np.float32)
    number = np.arange(B, dtype=np.int32)
    rows = {"own": number / np.float32(B), "number": number, "key": jax.random.key(0)[None]}
    return stack, x, {**rows, "key": jax.random.split(jax.random.key(0), B)}


def both_ways(place):
    """Return the value and its gradients."""
    (weights, indices), x, rows = given()

    def total(weights, x):
        y, gave = place.layers(layer, (weights, indices), x, rows)
        return (y**2).sum() + gave["sum"].sum(), (y, gave)

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(weights, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", by_name(WAYS, QUICK, pytest.mark.slow))
def test_layers_in_stages_give_what_they_give_one_after_the_other(way):
    (value, (y, gave)), grads = both_ways(axes(**way).build().placement)
    (wanted, (plain, gives)), slopes = both_ways(Unplaced())
    assert_close(value, wanted, 1e-6)
    assert_close(y, plain, 1e-6)
    assert_close(gave["sum"], gives["sum"], 1e-6)
    np.testing.assert_array_equal(gave["index"], gives["index"])
    assert distance(grads, slopes) < 1e-6
    assert np.isfinite(jax.tree.leaves(slopes)[0]).all()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_stage_computes_for_each_microbatch_once_and_in_order(way):
    schedule = axes(**way).build().schedule
    stages, whole = schedule.stages, schedule.stages * schedule.repeats
    done: Counter = Counter()
    for turn in range(schedule.turns):
        for stage in range(stages):
            entered = turn - stage
            if 0 <= entered < schedule.batches * schedule.repeats:
                batch = entered // whole * stages + entered % stages
                run = entered // stages % schedule.repeats * stages + stage
                assert done[batch] == run, "layers are passed in their order"
                done[batch] += 1
    assert done == dict.fromkeys(range(schedule.batches), whole)
    busy = sum(done.values()) / (stages * schedule.turns)
    assert schedule.bubble == pytest.approx(1 - busy)
    assert f"{schedule.bubble:.1%}" in str(schedule)


@pytest.mark.thorough
def test_what_a_layer_closes_over_is_learned_from():
    (weights, indices), x, rows = jax.tree.map(jnp.asarray, given())

    def slope(place):
        def total(scale):
            by = lambda one, x, rows: (x + scale * one[0] * rows["own"][:, None, None], ())
            return (place.layers(by, (weights[:, None, None], indices), x, rows)[0] ** 2).sum()

        return jax.jit(jax.grad(total))(jnp.float32(0.3))

    place = axes(stage=2, repeats=2, data=4).build().placement
    assert_close(slope(place), slope(Unplaced()), 1e-6)


def test_microbatches_are_summed_in_float32():
    own = np.ones((B, 1, 2), np.float32)
    own[0, 0, 0] = own[-1, 0, 1] = 256  # the first microbatch and the last
    x, rows = jnp.zeros((B, 1, 2), jnp.bfloat16), jnp.asarray(own, jnp.bfloat16)
    place = axes(stage=2, stage_batches=B, repeats=2, devices=2).build().placement
    by = lambda one, x, rows: (x + one * rows, ())
    total = lambda stack: place.layers(by, stack, x, rows)[0].astype(jnp.float32).sum()
    slopes = jax.jit(jax.grad(total))(jnp.ones((4, 1, 1, 2), jnp.bfloat16))
    assert slopes.dtype == jnp.bfloat16
    # In bfloat16 256 + 1 is 256, fifteen times.
    np.testing.assert_array_equal(slopes.astype(np.float32), np.full((4, 1, 1, 2), 272))


SIZES = {"vocab": 16, "context": 8, "layers": 4, "heads": 2, "width": 8}
MODEL = Transformer(**SIZES, scan=True, positions={"kind": "rotary"}, dropout=0.2)


def hidden(place, values=MODEL):
    """Return the model, the program of a sum over packed rows with dropout, and the parameters.

    The program returns the sum and that of its terms' sizes, and the gradient.
    """
    model = values.build(place)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 16, (B, 8)), jnp.int32)
    segments = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(1, 4, (B, 8)), jnp.int32), 1)
    keys = row_keys(jax.random.key(7), {"row": jnp.arange(B)})
    weights = np.random.default_rng(2).normal(size=(B, 8, 8)).astype(np.float32)

    def total(params):
        outputs, _ = model.hidden(params, {}, tokens, segments, rng=keys)
        return (outputs * weights).sum(), jnp.abs(outputs * weights).sum()

    params, _ = values.build().init(jax.random.key(0))
    return model, jax.value_and_grad(total, has_aux=True), params


@pytest.mark.slow
def test_dropout_and_segments_go_with_their_rows():
    where = axes(stage=2, repeats=2, data=4).build()
    model, fn, params = hidden(where.placement)
    params = jax.device_put(params, where.shardings(params, model.dims))
    (got, _), grads = jax.jit(fn)(params)
    _, plain, alone = hidden(Unplaced())
    (wanted, terms), slopes = jax.jit(plain)(alone)
    assert_close(got, wanted, 3e-7, terms=terms)
    assert distance(grads, slopes) < 1e-6


def test_microbatches_that_do_not_fit_the_stages_are_refused():
    with pytest.raises(ConfigError, match=r"stage_batches=6 .*stage=4.*Nearest: .*stage_batches=8"):
        axes(stage=4, stage_batches=6, data=2).build()


@pytest.mark.parametrize(
    ("asked", "layers", "error"),
    [
        ({"stage": 8}, 12,
            r"12 layers .*parallel\.stage=8\. Nearest: parallel\.stage=6, .*layers=8"),
        ({"stage": 2, "stage_batches": 8, "data": 4}, 8, r"16 rows .* 8 microbatches .*32 rows"),
    ],
)  # fmt: skip
def test_layers_and_rows_that_do_not_divide_are_refused(asked, layers, error):
    stack = jnp.ones((layers, D)), jnp.arange(layers)
    _, x, rows = given()
    place = axes(**asked).build().placement
    with pytest.raises(ShardingError, match=error):
        jax.eval_shape(lambda *given: place.layers(layer, *given), stack, jnp.asarray(x), rows)


ROWS, TIME, WIDTH, EXPERTS = 8, 6, 8, 4
DRAW = np.random.default_rng(0)
X, TOWARD = (DRAW.standard_normal((ROWS, TIME, WIDTH)).astype(np.float32) for _ in range(2))
EXACT = 1e-6
LAYOUTS = {
    "expert 2 x data 2 x tensor 2": {"expert": 2, "data": 2, "fsdp": 1, "tensor": 2},
    "expert 4 x fsdp 2": {"expert": 4, "fsdp": 2},
    "expert 4 x data 2": {"expert": 4, "data": 2, "fsdp": 1},
    "expert 2 x context 2 x slice 2": {"expert": 2, "context": 2, "slice": 2, "fsdp": 1},
    "expert 2 x fsdp 4": {"expert": 2, "fsdp": 4},
    "fsdp 4 x tensor 2, no expert axis": {"fsdp": 4, "tensor": 2},
    "expert 2 x tensor 4, sequence": {"expert": 2, "fsdp": 1, "tensor": 4, "sequence": True},
}
FEW = {"expert 2 x data 2 x tensor 2", "expert 4 x fsdp 2"}


def marks(kind: str, name: str) -> Any:
    if name not in FEW:
        return pytest.mark.slow
    return () if kind == "dropless" and "data" in name else pytest.mark.thorough


CASES = [
    pytest.param(kind, name, marks=marks(kind, name))
    for kind in ("dropless", "capacity")
    for name in LAYOUTS
]


def experts_of(kind: str, placement: Any = Unplaced(), count: int = EXPERTS):
    experts = Dropless(count=count) if kind == "dropless" else Capacity(count=count)
    config, stds = Transformer(width=WIDTH, hidden=16, activation="swiglu"), (0.6, 0.6)
    return from_nnx(
        lambda rngs: MixtureOfExperts(
            config, experts, placement, KeySequence(rngs.params.key[...]), stds
        )
    )


def results(model, params, x):
    """Return the output, the logits, and the gradient in the parameters and the input."""

    def toward(params, x):
        out, logits = model.apply(params, {}, x, train=True)[0]
        return (out * TOWARD).sum() + jnp.square(logits).sum(), (out, logits)

    grads, outputs = jax.jit(jax.grad(toward, (0, 1), has_aux=True))(params, x)
    return jax.device_get((outputs, grads))


@functools.cache
def on_one_device(kind: str):
    model = experts_of(kind)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    return params, results(model, params, jnp.asarray(X))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_gives_what_one_device_gives(kind: str, layout: str):
    params, expected = on_one_device(kind)
    where = Axes(min_size=0, **LAYOUTS[layout]).build()
    model = experts_of(kind, where.placement)
    split = jax.device_put(params, where.shardings(params, model.dims))
    shares = LAYOUTS[layout].get("expert", 1)
    assert split["up"].addressable_shards[0].data.shape[0] == EXPERTS // shares
    found = results(model, split, where.place({"x": X})["x"])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(got, want) < EXACT


def test_experts_that_their_axis_does_not_divide_are_refused():
    model = experts_of("dropless", Axes(expert=4, fsdp=2).build().placement, count=6)
    params, _ = jax.eval_shape(experts_of("dropless", count=6).init, jax.random.key(0))
    told = r"6 experts do not divide into parallel.expert=4. Take .*of 1, 2, 3, or a"
    with pytest.raises(ShardingError, match=told):
        jax.eval_shape(lambda p, x: model.apply(p, {}, x), params, X)


@pytest.mark.thorough
def test_rows_that_their_axes_do_not_divide_are_computed_on_all():
    """Check one row, as in generation: each device returns the outputs of its own experts."""
    params, _ = on_one_device("dropless")
    alone, _ = experts_of("dropless").apply(params, {}, jnp.asarray(X[:1]))
    model = experts_of("dropless", Axes(expert=4, fsdp=2).build().placement)
    found, _ = jax.jit(lambda p, x: model.apply(p, {}, x))(params, X[:1])
    assert distance(found[0], alone[0]) < EXACT


def test_tokens_are_exchanged_and_kernels_stay():
    """Check that a layer gathers tokens over the axis, sums back, and gathers no expert."""
    place = Axes(expert=4, data=2, fsdp=1).build().placement
    model, plain = experts_of("dropless", place), experts_of("dropless")
    params, _ = jax.eval_shape(plain.init, jax.random.key(0))
    jaxpr = str(jax.make_jaxpr(lambda p, x: model.apply(p, {}, x, train=True)[0])(params, X))
    assert jaxpr.count("all_gather[") == 3  # tokens, choices and weights
    assert jaxpr.count("reduce_scatter[") == 1
    assert "top_k" not in jaxpr, "the compiler would gather the logits of all rows"
    assert "psum" not in jaxpr.replace("psum_scatter", "")
