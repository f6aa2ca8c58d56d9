"""Layers in a scan, computed once more, or of several documents a row, are those written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from comparison import assert_close, distance

from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.core.rows import row_keys
from jtrain.data.text.token_rows import Packed
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.models.attention import places_within
from jtrain.models.layers.block_stack import stack_layers, unstack_layers
from jtrain.models.transformer import Transformer

pytestmark = pytest.mark.thorough

SMALL = {"vocab": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}
LIKE_LLAMA = {
    "kv_heads": 2,
    "positions": {"kind": "rotary"},
    "norm": "rms",
    "activation": "swiglu",
    "tied": False,
    "window": 3,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)
KEYS = row_keys(jax.random.key(5), {"row": np.arange(2, dtype=np.int32)})


def loss(model, params):
    logits, _ = model.apply(params, {}, TOKENS, train=True)
    return (logits**2).sum()


def drawn(model):
    """Make parameters far from their initial values."""
    draw = np.random.default_rng(1)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * draw.standard_normal(x.shape), jnp.float32), shapes
    )


@functools.cache
def plain():
    """Return the parameters, the loss and the gradient of a model without a scan."""
    model = Transformer(**SMALL, **LIKE_LLAMA).build()
    params = drawn(model)
    return params, *jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params)


def test_a_scan_gives_what_the_written_out_layers_give():
    params, value, grads = plain()
    model = Transformer(**SMALL, **LIKE_LLAMA, scan=True, remat="full").build()
    stacked = stack_layers(params)
    got, got_grads = jax.jit(jax.value_and_grad(functools.partial(loss, model)))(stacked)
    assert float(got) == pytest.approx(float(value), rel=1e-5)
    assert distance(unstack_layers(got_grads), grads) < 1e-6


def test_a_scan_drops_what_the_written_out_layers_drop():
    model, scanned = (Transformer(**SMALL, dropout=0.5, scan=how).build() for how in (False, True))
    params = drawn(model)
    run = lambda model: lambda params: model.apply(params, {}, TOKENS, rng=KEYS)[0]
    assert "random_bits" in str(jax.make_jaxpr(run(scanned))(stack_layers(params)))
    want, got = jax.jit(run(model))(params), jax.jit(run(scanned))(stack_layers(params))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize(
    "values",
    [{}, {**LIKE_LLAMA, "qk_norm": True}, {"experts": {"kind": "dropless", "count": 4}}],
    ids=["gpt", "llama", "experts"],
)
def test_every_leaf_of_stacked_layers_is_named_so_and_no_other(values):
    """Check the names by which optimizers recognise the leaf of one layer."""
    adapter = pydantic.TypeAdapter(Transformer)
    model = adapter.validate_python({**SMALL, **values, "scan": True}).build()
    params = named_leaves(jax.eval_shape(model.init, jax.random.key(0))[0])
    stacked = {name for name, leaf in params.items() if model.dims.get(name, ())[:1] == ("layers",)}
    assert stacked == {name for name in params if name.startswith("blocks/")}
    assert all(len(model.dims[name]) == params[name].ndim for name in stacked)


def test_what_is_computed_once_more_is_the_same():
    params, value, grads = plain()
    how = {"remat": "names", "saved": ("qkv", "hidden")}
    model = Transformer(**SMALL, **LIKE_LLAMA, **how).build()
    got, got_grads = jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params)
    assert float(got) == pytest.approx(float(value), rel=1e-6)
    assert distance(got_grads, grads) < 1e-6


SIZES = {"vocab": 17, "context": 16, "layers": 2, "heads": 2, "width": 16}
POSITIONS = {
    "learned": {"positions": {"kind": "learned"}},
    "rotary, scanned": {
        "positions": {"kind": "rotary"},
        "scan": True,
        "remat": "full",
        "window": 5,
    },
    "none": {"positions": {"kind": "none"}, "kv_heads": 1},
}
LENGTHS = [3, 9, 4, 17, 2, 12, 5]


def packed() -> dict:
    tokens = np.random.default_rng(0).integers(0, 17, sum(LENGTHS))
    source = Packed(tokens, context=16, documents=np.cumsum([0, *LENGTHS]))
    rows = source[np.arange(len(source))]
    assert rows["segments"].max() > 2, "several documents in a row"
    return rows | {"mask": np.ones(len(source), bool), "row": np.arange(len(source))}


def alone(rows: dict) -> dict:
    """Put each document in a row of its own."""
    parts = [
        rows["tokens"][row, rows["segments"][row] == number]
        for row in range(len(rows["tokens"]))
        for number in range(1, rows["segments"][row].max() + 1)
    ]
    tokens = np.zeros((len(parts), 17), np.int32)
    for row, part in enumerate(parts):
        tokens[row, : len(part)] = part
    length = np.array([len(part) - 1 for part in parts], np.int32)
    return {"tokens": tokens, "length": length, "mask": np.ones(len(parts), bool)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", POSITIONS)
def test_packed_documents_have_the_loss_and_gradient_of_each_alone(kind: str, strict_dtypes):
    model = Transformer(**SIZES | POSITIONS[kind]).build(Unplaced())
    params, _ = model.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
    rows = packed()

    def loss(params, batch):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, segments=segments_of(batch))
        mean, _ = next_token(logits, targets, real)
        return mean.total / mean.weight, mean.weight

    of = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, weight), grads = of(params, {k: jnp.asarray(v) for k, v in rows.items()})
    (expected, count), wanted = of(params, {k: jnp.asarray(v) for k, v in alone(rows).items()})
    assert weight == count == sum(LENGTHS) - len(LENGTHS)
    assert_close(value, expected, 1e-6)
    assert distance(grads, wanted) < 2e-6  # over all: that of a key's bias is 0 and rounding
    # Without the segments it is another loss: documents see one another.
    with_all = {k: jnp.asarray(v) for k, v in rows.items() if k != "segments"}
    assert abs(of(params, with_all)[0][0] - expected) > 1e-3


def test_places_begin_anew_with_each_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 4, 1]])
    places = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 0]]
    assert places_within(segments).tolist() == places
