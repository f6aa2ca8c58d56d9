"""The transformer: its first values, its pieces, its precision and its published sizes.

tests/models/pretrained compares its options with the models of `transformers`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from comparison import assert_close, distance
from tiny_language import stack_layers

from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.rows import row_keys
from jtrain.data.text.token_rows import Packed
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.models.layers.block_stack import unstack_layers
from jtrain.models.presets import LANGUAGE_PRESETS
from jtrain.models.transformer import Transformer

TOKENS = np.random.default_rng(0).integers(0, 11, (3, 8)).astype(np.int32)


@pytest.mark.thorough
def test_starts_like_gpt_2():
    model = Transformer(vocab=65, layers=3).build()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    for name, leaf in named_leaves(params).items():
        if name.endswith("bias"):
            assert not leaf.any(), name
        elif name.endswith("scale"):
            assert (leaf == 1).all(), name
        else:  # 4 standard errors of a standard deviation
            std = 0.02 / math.sqrt(6) if "out/" in name or "down/" in name else 0.02
            assert abs(leaf.std() / std - 1) < 4 / math.sqrt(2 * leaf.size), name
    logits, _ = jax.jit(model.apply, static_argnames="train")(params, {}, TOKENS)
    assert jnp.abs(jax.nn.log_softmax(logits) + math.log(65)).max() < 2


SMALL = {"vocab": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}
LIKE_GEMMA = {
    "kv_heads": 1,
    "head_size": 6,
    "positions": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}},
    "norm": "rms",
    "epsilon": 1e-3,
    "activation": "gelu_exact",
    "qk_norm": True,
    "attention_cap": 2.0,
    "logit_cap": 3.0,
}
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)


def drawn(model, scale=0.3):
    """Make parameters far from their initial values."""
    draw = np.random.default_rng(1)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    fill = lambda x: jnp.asarray(scale * draw.standard_normal(x.shape), jnp.float32)
    return jax.tree.map(fill, shapes)


def built():
    model = Transformer(**SMALL, **LIKE_GEMMA).build()
    return model, drawn(model, 0.5)


def test_the_product_of_its_pieces_is_its_logits():
    model, params = built()

    @jax.jit
    def both(params):
        hidden, extra = model.hidden(params, {}, TEXT)
        assert extra == {}
        return hidden @ model.head(params).T, model.apply(params, {}, TEXT)[0]

    product, logits = both(params)
    assert_close(3 * np.tanh(product / 3), logits, 2e-6)


@pytest.mark.thorough
def test_what_is_in_half_precision_is_computed_in_whole():
    """Check that angles, norms, softmax and caps of bfloat16 parameters are those of float32."""
    model, params = built()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    apply = jax.jit(model.apply, static_argnames="train")
    got = apply(half, {}, TEXT)[0]
    want = apply(whole, {}, TEXT)[0]
    assert got.dtype == jnp.bfloat16
    apart = np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want)
    assert apart < 0.03  # 8 bits: 0.4 % a rounding, a few dozen of them


# From the published configurations, biases and norms counted.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", LANGUAGE_PRESETS)
def test_has_as_many_parameters_as_was_published(name: str):
    model = Transformer(preset=name, scan=True).build()  # one block is traced
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert num_elements(params) == PARAMETERS[name]


LIKE_LLAMA = {
    "kv_heads": 2,
    "positions": {"kind": "rotary"},
    "norm": "rms",
    "activation": "swiglu",
    "tied": False,
    "window": 3,
}
KEYS = row_keys(jax.random.key(5), {"row": np.arange(2, dtype=np.int32)})


def loss(model, params):
    logits, _ = model.apply(params, {}, TEXT, train=True)
    return (logits**2).sum()


@functools.cache
def plain():
    """Return the parameters, the loss and the gradient of a model without a scan."""
    model = Transformer(**SMALL, **LIKE_LLAMA).build()
    params = drawn(model)
    return params, *jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params)


@pytest.mark.thorough
def test_a_scan_gives_what_the_written_out_layers_give():
    params, value, grads = plain()
    model = Transformer(**SMALL, **LIKE_LLAMA, scan=True, remat="full").build()
    stacked = stack_layers(params)
    got, got_grads = jax.jit(jax.value_and_grad(functools.partial(loss, model)))(stacked)
    assert float(got) == pytest.approx(float(value), rel=1e-5)
    assert distance(unstack_layers(got_grads), grads) < 1e-6


@pytest.mark.thorough
def test_a_scan_drops_what_the_written_out_layers_drop():
    model, scanned = (Transformer(**SMALL, dropout=0.5, scan=how).build() for how in (False, True))
    params = drawn(model)
    run = lambda model: lambda params: model.apply(params, {}, TEXT, rng=KEYS)[0]
    assert "random_bits" in str(jax.make_jaxpr(run(scanned))(stack_layers(params)))
    want, got = jax.jit(run(model))(params), jax.jit(run(scanned))(stack_layers(params))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize(
    "values",
    [{}, {**LIKE_LLAMA, "qk_norm": True}, {"experts": {"kind": "dropless", "count": 4}}],
    ids=["gpt", "llama", "experts"],
)
@pytest.mark.thorough
def test_every_leaf_of_stacked_layers_is_named_so_and_no_other(values):
    """Check the names by which optimizers recognise the leaf of one layer."""
    adapter = pydantic.TypeAdapter(Transformer)
    model = adapter.validate_python({**SMALL, **values, "scan": True}).build()
    params = named_leaves(jax.eval_shape(model.init, jax.random.key(0))[0])
    stacked = {name for name, leaf in params.items() if model.dims.get(name, ())[:1] == ("layers",)}
    assert stacked == {name for name in params if name.startswith("blocks/")}
    assert all(len(model.dims[name]) == params[name].ndim for name in stacked)


@pytest.mark.thorough
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


@pytest.mark.thorough
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
