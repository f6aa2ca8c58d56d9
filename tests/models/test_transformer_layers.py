"""Layers in a scan, and layers computed once more, are the layers written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from comparison import assert_close, distance

from jtrain.core.pytree import named_leaves
from jtrain.core.rows import row_keys
from jtrain.models.layers.block_stack import stack_layers, stack_modules, unstack_layers
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.linear import Linear
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


def test_stacked_modules_draw_what_they_would_draw_one_after_the_other():
    make = lambda draws: Linear(2, 3, rngs=draws)
    one_by_one, together = KeySequence(jax.random.key(0)), KeySequence(jax.random.key(0))
    assert one_by_one.params() == together.params()
    kernels = [make(one_by_one).kernel[...] for _ in range(3)]
    np.testing.assert_array_equal(stack_modules(make, 3, together).kernel[...], kernels)
    assert one_by_one.params() == together.params()
    assert (kernels[0] != kernels[1]).all()


@pytest.mark.slow
def test_a_scan_starts_from_the_same_numbers():
    of = lambda **how: jax.jit(Transformer(**SMALL, **LIKE_LLAMA, **how).build().init)
    params, together = (of(scan=scan)(jax.random.key(0))[0] for scan in (False, True))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(together), params)
    jax.tree.map(np.testing.assert_array_equal, together, stack_layers(params))


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


def test_a_scan_is_one_block_however_many_layers():
    size = lambda layers: len(str(_program(Transformer(**{**SMALL, "layers": layers}, scan=True))))
    assert size(12) < 1.02 * size(3)


def _program(values: Transformer):
    model = values.build()
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return jax.make_jaxpr(jax.grad(functools.partial(loss, model)))(params)


def products(jaxpr) -> int:
    """Matrix products in a program, those of its inner programs included."""
    inner = [
        p for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=_holds)
    ]
    own = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    return own + sum(products(getattr(p, "jaxpr", p)) for p in inner if _holds(p))


def _holds(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def test_each_policy_computes_once_more_what_it_says():
    """Count products: a block has 7 forward: qkv, scores, mixed, out, gate, up, down."""
    of = lambda **how: products(_program(Transformer(**SMALL, **LIKE_LLAMA, **how)).jaxpr)
    none, layers = of(), SMALL["layers"]
    # What nothing asks for is not computed: the block's last product is added and no more.
    again = lambda **how: (of(**how) - none) / layers
    assert again(remat="full") == 6
    assert again(remat="dots") == 0
    assert again(remat="dots_with_no_batch_dims") == 2  # scores and mixed have a batch dim
    assert again(remat="names", saved=("qkv", "attention")) == 4  # scores, out, gate, up
    assert again(remat="names", saved=("qkv", "attention", "hidden")) == 2  # scores, out


def test_what_is_computed_once_more_is_the_same():
    params, value, grads = plain()
    how = {"remat": "names", "saved": ("qkv", "hidden")}
    model = Transformer(**SMALL, **LIKE_LLAMA, **how).build()
    got, got_grads = jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params)
    assert float(got) == pytest.approx(float(value), rel=1e-6)
    assert distance(got_grads, grads) < 1e-6
