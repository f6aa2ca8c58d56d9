"""Explicit axes: a silent exchange is an error, and stacked weights are gathered by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import distance

import jtrain as jt
from jtrain.errors import CodeError
from jtrain.models import Transformer
from jtrain.parallel import FSDP, Axes, Mirrored

X = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
MODEL = Transformer(vocab=64, context=16, layers=4, heads=2, width=32, scan=True)


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


def test_the_weights_of_a_stack_are_gathered_layer_by_layer_and_again_backwards():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
    batch = {"tokens": tokens, "row": np.arange(8, dtype=np.int32), "mask": np.ones(8, bool)}
    results = []
    for explicit in (False, True):
        where = FSDP(devices=4, min_size=0, explicit=explicit).build()
        network, rule = MODEL.build(where.placement), optax.sgd(0.1)

        def loss(params, batch, rng, network=network):
            logits, _ = network.apply(params, {}, batch["tokens"])
            real = jnp.broadcast_to(batch["mask"][:, None], batch["tokens"].shape)
            return jt.losses.next_token(logits, batch["tokens"], real)

        make = lambda network=network, rule=rule: jt.new_state(
            network.init(jax.random.key(0))[0], rule, jax.random.key(1)
        )
        shardings = where.shardings(jax.eval_shape(make), network.dims)
        state, placed = jax.jit(make, out_shardings=shardings)(), where.place(batch)
        sharding = where.gradient_sharding(state.params, network.dims)
        step = jt.make_step(where.loss(loss, network.dims), rule, sharding=sharding)
        program = where.lower(step, state, placed, returns_state=True).compile()
        gathers = re.findall(r"(\S+) all-gather\(", program.as_text())
        results.append((gathers, jax.device_get(program(state, placed)[0].params)))
    (_, params), (gathers, same) = results
    assert distance(params, same) < 1e-6
    assert not [shape for shape in gathers if shape.startswith("f32[4,32,")]


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
