"""A mixture of experts over a mesh gives what one device gives, forward and backward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import distance

from jtrain.core.placement import Unplaced
from jtrain.errors import ShardingError
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.experts import Capacity, Dropless
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.feed_forward import MixtureOfExperts
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes

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
QUICK = {"expert 2 x data 2 x tensor 2", "expert 4 x fsdp 2"}


def marks(kind: str, name: str) -> Any:
    if name not in QUICK:
        return pytest.mark.slow
    return () if kind == "dropless" and "data" in name else pytest.mark.thorough


CASES = [
    pytest.param(kind, name, marks=marks(kind, name))
    for kind in ("dropless", "capacity")
    for name in LAYOUTS
]


def layer(kind: str, placement: Any = Unplaced(), count: int = EXPERTS):
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
    model = layer(kind)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    return params, results(model, params, jnp.asarray(X))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_gives_what_one_device_gives(kind: str, layout: str):
    params, expected = on_one_device(kind)
    where = Axes(min_size=0, **LAYOUTS[layout]).build()
    model = layer(kind, where.placement)
    split = jax.device_put(params, where.shardings(params, model.dims))
    shares = LAYOUTS[layout].get("expert", 1)
    assert split["up"].addressable_shards[0].data.shape[0] == EXPERTS // shares
    found = results(model, split, where.place({"x": X})["x"])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(got, want) < EXACT


def test_experts_that_their_axis_does_not_divide_are_refused():
    kind, count, axis, fits = "dropless", 6, 4, "1, 2, 3"
    place = Axes(expert=axis, fsdp=2).build().placement
    model = layer(kind, place, count)
    params, _ = jax.eval_shape(layer(kind, count=count).init, jax.random.key(0))
    told = rf"{count} experts do not divide into parallel.expert={axis}. Take .*of {fits}, or a"
    with pytest.raises(ShardingError, match=told):
        jax.eval_shape(lambda p, x: model.apply(p, {}, x), params, X)


@pytest.mark.thorough
def test_rows_that_their_axes_do_not_divide_are_computed_on_all():
    """Check one row, as in generation: each device returns the outputs of its own experts."""
    params, _ = on_one_device("dropless")
    alone, _ = layer("dropless").apply(params, {}, jnp.asarray(X[:1]))
    model = layer("dropless", Axes(expert=4, fsdp=2).build().placement)
    found, _ = jax.jit(lambda p, x: model.apply(p, {}, x))(params, X[:1])
    assert distance(found[0], alone[0]) < EXACT


def test_tokens_are_exchanged_and_kernels_stay():
    """Check that a layer gathers tokens over the axis, sums back, and gathers no expert."""
    place = Axes(expert=4, data=2, fsdp=1).build().placement
    model, plain = layer("dropless", place), layer("dropless")
    params, _ = jax.eval_shape(plain.init, jax.random.key(0))
    jaxpr = str(jax.make_jaxpr(lambda p, x: model.apply(p, {}, x, train=True)[0])(params, X))
    assert jaxpr.count("all_gather[") == 3  # tokens, choices and weights
    assert jaxpr.count("reduce_scatter[") == 1
    assert "top_k" not in jaxpr, "the compiler would gather the logits of all rows"
    assert "psum" not in jaxpr.replace("psum_scatter", "")
