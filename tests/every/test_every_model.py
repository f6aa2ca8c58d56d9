"""What holds for every model. A new member is a new row of MEMBERS."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name
from comparison import assert_close, distance

from jtrain.core.pytree import describe, named_leaves
from jtrain.core.rows import row_keys
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.next_token import next_token
from jtrain.models.cnn import CNN
from jtrain.models.efficientnet_lite import EfficientNetLite
from jtrain.models.mlp import MLP
from jtrain.models.resnet import ResNet
from jtrain.models.transformer import Transformer
from jtrain.models.vit import ViT

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ROWS = 8
DRAW = np.random.default_rng(0)


def _next_token(logits, targets):
    return next_token(logits, targets, jnp.ones(targets.shape, bool))[0]


def _class(logits, labels):
    return cross_entropy(logits, labels, jnp.ones(labels.shape, bool))[0]


class Row(NamedTuple):
    """A small member, what goes in, what should come out, and what it is judged by."""

    values: Any
    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable
    outputs: tuple[int, ...]
    dims: set[tuple[str, ...]]
    names: list[str]


def _tokens(*shape: int) -> np.ndarray:
    return DRAW.integers(0, 11, shape).astype(np.int32)


TEXT = {"loss": _next_token, "inputs": _tokens(ROWS, 6), "targets": _tokens(ROWS, 6)}
SMALL = {"vocab": 11, "context": 6, "layers": 1, "heads": 2, "width": 16, "dropout": 0.2}
DIMS = {
    ("rows", "time", "width"),
    ("batch", "time", "width"),
    ("batch", "time", "heads", "head_size"),
    ("batch", "time", "hidden"),
    ("rows", "time", "vocab"),
}
TOGETHER = ("batch", "time", "kv_heads", None, None)  # queries, keys and values
LOOKED_UP = ("group", "time", "split")  # the tokens
PLACES = [  # at experts with a capacity
    ("batch", None, "width"),
    ("batch", None, None, "width"),
    ("batch", "experts", None, "width"),
    ("batch", "experts", None, "hidden"),
]
KERNELS = ["down/kernel", "norm_attention/scale", "norm_mlp/scale", "out/kernel", "qkv/kernel"]
BIASES = ["down/bias", "norm_attention/bias", "norm_mlp/bias", "out/bias", "qkv/bias", "up/bias"]


def _names(block: list[str], *others: str) -> list[str]:
    return sorted([f"blocks/0/{name}" for name in block] + list(others))


IMAGES: Any = {
    "inputs": DRAW.standard_normal((ROWS, 6, 6, 2)).astype(np.float32),
    "targets": DRAW.integers(0, 5, ROWS).astype(np.int32),
    "loss": _class,
    "outputs": (ROWS, 5),
}
IMAGE = {"image": (6, 6, 2), "classes": 5, "dropout": 0.2}
SQUARES = ("batch", "height", "width", "channels")


def _resnet_names(convolutions: int, *, short: bool) -> list[str]:
    both = lambda norm: [f"{norm}/scale", f"{norm}/bias"]
    block = [f"convolutions/{i}/kernel" for i in range(convolutions)]
    block += [name for i in range(convolutions) for name in both(f"norms/{i}")]
    block += ["short/kernel", *both("norm_short")] if short else []
    return _names(block, "stem/kernel", *both("norm"), "head/kernel", "head/bias")


def _lite_names() -> list[str]:
    both = lambda norm: [f"{norm}/scale", f"{norm}/bias"]
    layers = [("depthwise", "project"), *[("expand", "depthwise", "project")] * 6]
    names = ["stem/kernel", "features/kernel", "head/kernel", "head/bias"]
    names += [*both("norm"), *both("norm_features")]
    for i, block in enumerate(layers):
        for layer in block:
            names += [f"blocks/{i}/{layer}/kernel", *both(f"blocks/{i}/norm_{layer}")]
    return sorted(names)


MEMBERS = {
    "transformer": Row(
        values=Transformer(**SMALL),
        outputs=(ROWS, 6, 11),
        dims={*DIMS, TOGETHER, LOOKED_UP},
        names=_names(
            [*KERNELS, "up/kernel", *BIASES], "norm/bias", "norm/scale", "positions", "tokens"
        ),
        **TEXT,
    ),
    "transformer, free head, no bias": Row(
        values=Transformer(**SMALL, tied=False, bias=False),
        outputs=(ROWS, 6, 11),
        dims={*DIMS, TOGETHER, LOOKED_UP},
        names=_names([*KERNELS, "up/kernel"], "head", "norm/scale", "positions", "tokens"),
        **TEXT,
    ),
    **{
        f"transformer, {kind} experts": Row(
            values=Transformer(**SMALL, bias=False, experts={"kind": kind, "count": 3}),
            outputs=(ROWS, 6, 11),
            dims={*DIMS - {("batch", "time", "hidden")}, TOGETHER, LOOKED_UP, *dims},
            names=_names(
                [name for name in KERNELS if not name.startswith("down")]
                + [f"mixture/{name}" for name in ("router", "up", "down")],
                *("norm/scale", "positions", "tokens"),
            ),
            **TEXT,
        )
        for kind, dims in {"dropless": (), "capacity": PLACES}.items()
    },
    "mlp": Row(
        values=MLP(inputs=12, widths=(32, 16), classes=5, dropout=0.2),
        inputs=DRAW.standard_normal((ROWS, 3, 4)).astype(np.float32),
        targets=DRAW.integers(0, 5, ROWS).astype(np.int32),
        loss=_class,
        outputs=(ROWS, 5),
        dims={("batch", "hidden"), ("batch", "classes")},
        names=[f"layers/{i}/{name}" for i in range(3) for name in ("bias", "kernel")],
    ),
    "cnn": Row(
        values=CNN(**IMAGE, channels=(8, 16), widths=(16,)),
        dims={SQUARES, ("batch", "hidden"), ("batch", "classes")},
        names=sorted(
            f"{layers}/{i}/{name}"
            for layers in ("convolutions", "layers")
            for i in range(2)
            for name in ("bias", "kernel")
        ),
        **IMAGES,
    ),
    "resnet": Row(
        values=ResNet(**IMAGE, blocks=(1,), width=16, bottleneck=True),
        dims={SQUARES, ("batch", "channels"), ("batch", "classes")},
        names=_resnet_names(3, short=True),
        **IMAGES,
    ),
    "resnet, group norm, small images": Row(
        values=ResNet(**IMAGE, blocks=(1,), width=16, norm="group", groups=4, stem="cifar"),
        dims={SQUARES, ("batch", "channels"), ("batch", "classes")},
        names=_resnet_names(2, short=False),
        **IMAGES,
    ),
    "efficientnet lite": Row(
        values=EfficientNetLite(**IMAGE, stem=16, widths=(8,) * 7, blocks=(1,) * 7, features=16),
        dims={SQUARES, ("batch", "channels"), ("batch", "classes")},
        names=_lite_names(),
        **IMAGES,
    ),
    "vit": Row(
        values=ViT(**IMAGE, patch=3, layers=1, heads=2, width=16),
        dims={
            *DIMS - {("rows", "time", "width"), ("rows", "time", "vocab")},
            ("batch", "time", "heads", None, None),
            ("batch", "width"),
            ("batch", "classes"),
        },
        names=_names(
            [*KERNELS, "up/kernel", *BIASES],
            *(f"{part}/{name}" for part in ("patches", "head") for name in ("kernel", "bias")),
            *("norm/bias", "norm/scale", "positions", "token"),
        ),
        **IMAGES,
    ),
}
# Those of which a row knows of no other.
APART = {
    name: row
    for name, row in MEMBERS.items()
    if getattr(row.values, "couples", "nothing") != "batch"
}


LONG = [
    "transformer, free head, no bias",
    "transformer, capacity experts",
    "resnet, group norm, small images",
    "efficientnet lite",
]


@pytest.fixture(
    params=by_name(list(MEMBERS), MEMBERS.keys() - LONG, pytest.mark.thorough), name="row"
)
def _row(request) -> Row:
    row = MEMBERS[request.param]
    return row._replace(inputs=jnp.asarray(row.inputs), targets=jnp.asarray(row.targets))


@pytest.mark.sampled(2)
@pytest.mark.thorough
def test_what_makes_rows_meet_says_so(row):
    apply, params, extra = ready(row)
    train = lambda inputs: apply(params, extra, inputs, rng=keys_of(np.arange(ROWS)))[0]
    others = jnp.where(jnp.arange(ROWS) < 2, row.inputs.T, row.inputs[::-1].T).T
    meets = np.abs(train(row.inputs) - train(others))[:2].max() > 1e-3
    assert meets == (getattr(row.values, "couples", "nothing") == "batch")


@functools.cache
def _built(values):
    model = values.build()
    init = jax.jit(model.init)
    params, extra = init(jax.random.key(0))
    return init, (jax.jit(model.apply, static_argnames="train"), params, extra)


def ready(row: Row):
    return _built(row.values)[1]


@functools.cache
def _gradient(values, loss):
    _, (apply, _, extra) = _built(values)
    total = lambda p, x, y: loss(apply(p, extra, x)[0], y).total
    return total, jax.jit(jax.grad(total))


def keys_of(rows) -> jax.Array:
    return row_keys(jax.random.key(7), {"row": jnp.asarray(rows, jnp.int32)})


@pytest.mark.sampled(3)
def test_gives_logits_of_the_shape_and_dtype_it_says(row):
    apply, params, extra = ready(row)
    outputs, _ = apply(params, extra, row.inputs)
    assert outputs.shape == row.outputs
    assert outputs.dtype == jnp.float32
    assert jnp.isfinite(outputs).all()


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
def test_names_its_parameters_as_ever(row):
    _, params, _ = ready(row)
    assert sorted(named_leaves(params)) == row.names
    assert set(describe(params).values()) >= {"float32[16]"}


@pytest.mark.sampled(3)
def test_init_depends_on_the_key_alone(row):
    init, _ = _built(row.values)
    first, again, other = (init(jax.random.key(k))[0] for k in (3, 3, 4))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, again)))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), first, other)
    assert not all(jax.tree.leaves(same))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", APART, indirect=True)
def test_a_row_drops_by_its_own_key_wherever_it_stands(row):
    apply, params, extra = ready(row)
    run = lambda rows: apply(params, extra, row.inputs[rows], rng=keys_of(rows))[0]
    whole = run(np.arange(ROWS))
    order = np.array([5, 2, 7, 0, 1, 4, 3, 6])
    assert_close(run(order), whole[order], 1e-5)
    kept, _ = apply(params, extra, row.inputs, rng=keys_of(np.arange(ROWS)), train=False)
    assert np.abs(whole - kept).max() > 1e-3, "nothing was dropped"


@pytest.mark.sampled(3)
def test_two_rows_do_not_drop_alike(row):
    apply, params, extra = ready(row)
    order = np.array([0, 0, 0, 0, *range(4, ROWS)])  # of equal rows alone batch norm makes zeros
    outputs, _ = apply(params, extra, row.inputs[order], rng=keys_of(np.arange(ROWS)))
    assert np.abs(outputs[1:4] - outputs[:1]).max() > 1e-3


def test_training_with_dropout_and_no_keys_is_refused(row):
    apply, params, extra = ready(row)
    with pytest.raises(ValueError, match=r"dropout=0\.2 and got no keys.*row_keys\(rng, batch\)"):
        apply(params, extra, row.inputs, train=True)


@pytest.mark.thorough
def test_learns_a_batch_by_heart_in_20_steps(row):
    apply, params, extra = ready(row)
    optimizer = optax.adam(3e-2)

    def step(carry, _):
        params, memory = carry

        def loss(params):
            outputs, _ = apply(params, extra, row.inputs)
            mean = row.loss(outputs, row.targets)
            return mean.total / mean.weight

        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes by itself
            updates, memory = optimizer.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    run = jax.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), length=20))
    _, losses = run(params)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.sampled(3)
def test_every_parameter_gets_a_gradient(row):
    _, params, _ = ready(row)
    _, gradient = _gradient(row.values, row.loss)
    for name, grad in named_leaves(gradient(params, row.inputs, row.targets)).items():
        assert jnp.isfinite(grad).all(), name
        assert jnp.abs(grad).max() > 0, name


class Recording:
    """A placement that places nothing and remembers the names it heard."""

    rows, times = 1, 1

    def __init__(self):
        self.heard: set[tuple[str | None, ...]] = set()
        self.attended: list[tuple[int, ...]] = []
        self.mixed: list[tuple[int, ...]] = []

    def constrain(self, x, *dims):
        assert len(dims) == x.ndim, (dims, x.shape)
        self.heard.add(dims)
        return x

    def attend(self, attention, q, k, v, segments=None):
        self.attended += [x.shape for x in (q, k, v)]
        return attention(q, k, v, segments)

    def order(self, time):
        del time

    def put_back(self, x):
        return x

    def saved(self, names):
        return jax.checkpoint_policies.save_only_these_names(*names)

    def experts(self, mix, x, chosen, weights, kernels, dims):
        for kernel, names in zip(kernels, dims, strict=True):
            assert len(names) == kernel.ndim, (names, kernel.shape)
        self.mixed.append(chosen.shape)
        return mix(x, chosen, weights, *kernels)

    def layers(self, layer, stack, x, rows):
        return jax.lax.scan(lambda x, one: layer(one, x, rows), x, stack)


def test_tells_the_placement_its_dims_by_name(row):
    place = Recording()
    model = row.values.build(place)
    params, extra = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(lambda p, e: model.apply(p, e, row.inputs), params, extra)
    assert place.heard == row.dims
    if isinstance(row.values, Transformer):
        assert place.attended == [(ROWS, 6, 2, 8)] * 3 * row.values.layers
        mixed = row.values.layers if row.values.experts.kind == "dropless" else 0
        assert place.mixed == [(ROWS, 6, 2)] * mixed
    if isinstance(row.values, ViT):
        assert place.attended == [(ROWS, 5, 2, 8)] * 3 * row.values.layers


@pytest.mark.sampled(2)
def test_compiles_once_for_a_shape(row):
    traces = []
    model = row.values.build()

    @jax.jit
    def run(params, extra, x):
        traces.append(None)
        return model.apply(params, extra, x)

    init, _ = _built(row.values)
    for seed in range(3):
        run(*init(jax.random.key(seed)), row.inputs)
    assert len(traces) == 1


def test_builds_without_making_an_array(row):
    before = {id(x) for x in jax.live_arrays()}
    model = row.values.build()
    assert not [x for x in jax.live_arrays() if id(x) not in before]
    assert model.init


HOWS = ["vmap", "scan", "shard_map", "pmap"]
# Each model under one of them, so that all are met; the whole matrix is slow.
TRANSFORMED = [
    pytest.param(name, how, marks=pytest.mark.slow if HOWS[i % len(HOWS)] != how else ())
    for i, name in enumerate(MEMBERS)
    for how in HOWS
]


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("row", "how"), TRANSFORMED, indirect=["row"])
def test_gradients_go_through_every_transformation(row, how):
    _, params, _ = ready(row)
    loss, gradient = _gradient(row.values, row.loss)
    whole = gradient(params, row.inputs, row.targets)
    halves = [x.reshape(2, ROWS // 2, *x.shape[1:]) for x in (row.inputs, row.targets)]
    grads_of = {"vmap": _by_vmap, "scan": _by_scan, "shard_map": _by_shard_map, "pmap": _by_pmap}
    split = grads_of[how](loss, params, *halves)
    assert distance(split, whole) < 2e-6


def _summed(grads):
    return jax.tree.map(lambda g: g.sum(0), grads)


def _by_vmap(loss, params, x, y):
    return _summed(jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, y))


def _by_scan(loss, params, x, y):
    each = lambda carry, xy: (carry, jax.grad(loss)(params, *xy))
    return _summed(jax.jit(lambda x, y: jax.lax.scan(each, 0, (x, y)))(x, y)[1])


def _by_shard_map(loss, params, x, y):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    rows, whole = jax.P("data"), jax.P()
    grads = jax.shard_map(
        lambda p, x, y: jax.lax.psum(jax.grad(loss)(p, x[0], y[0]), "data"),
        mesh=mesh,
        in_specs=(whole, rows, rows),
        out_specs=whole,
        check_vma=False,  # jax 0.12 cannot check the erfc of an exact GELU
    )
    return jax.jit(grads)(params, x, y)


def _by_pmap(loss, params, x, y):
    return _summed(jax.pmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y))
