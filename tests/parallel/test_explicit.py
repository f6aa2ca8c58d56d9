"""Explicit axes: a silent exchange is an error, and stacked weights are gathered by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrain as jt
from jtrain.errors import CodeError
from jtrain.models import Transformer
from jtrain.parallel import FSDP, Axes, Mirrored

X = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
MODEL = Transformer(vocab=64, context=16, layers=3, heads=2, width=32, scan=True)


def of_pairs(params, batch, rng):
    height = batch["x"] @ params["w"]
    return jt.Mean.of(jnp.square(height @ height.T).mean(1), batch["mask"])


def test_a_product_of_all_rows_with_all_rows_is_an_error_with_its_line():
    where = Mirrored(devices=4, explicit=True)
    with pytest.raises(CodeError) as caught:
        jt.fit(of_pairs, {"w": jnp.eye(8)}, {"x": X}, steps=1, batch=16, parallel=where)
    said = str(caught.value)
    assert "height @ height.T" in said
    assert "parallel.explicit=false" in said


def test_the_weights_of_a_stack_are_gathered_layer_by_layer():
    where, rule = FSDP(devices=4, min_size=0, explicit=True).build(), optax.sgd(0.1)
    network = MODEL.build(where.placement)

    def loss(params, batch, rng):
        logits, _ = network.apply(params, {}, batch["tokens"])
        real = jnp.broadcast_to(batch["mask"][:, None], batch["tokens"].shape)
        return jt.losses.next_token(logits, batch["tokens"], real)

    shapes = jax.eval_shape(
        lambda key: jt.new_state(network.init(key)[0], rule, key), jax.random.key(0)
    )
    shardings = where.shardings(shapes, network.dims)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    batch = {"tokens": jnp.zeros((8, 16), int), "row": jnp.arange(8), "mask": jnp.ones(8, bool)}
    sharding = where.gradient_sharding(state.params, network.dims)
    step = jt.make_step(where.loss(loss, network.dims), rule, sharding=sharding)
    program = where.lower(step, state, batch, returns_state=True).compile()
    gathered = re.findall(r"f32\[(\S+?)\]\S* all-gather\(", program.as_text())
    assert gathered
    stacks = [shape for shape in gathered if re.fullmatch(r"3,\d+,\d+", shape)]
    assert not stacks


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mirrored(explicit=True, impl="shard_map"), "parallel.impl=jit"),
        (lambda: Axes(explicit=True, stage=2), "parallel.stage=1"),
    ],
)
def test_what_has_no_explicit_form_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
