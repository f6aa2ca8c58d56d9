"""Explicit axes: a silent exchange is an error, and stacked weights are gathered by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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


class Pooled(nnx.Module):
    """A convolution and a pool of flax, for which jtrain has a faster one on a CPU."""

    def __init__(self):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0))
        self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        y = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.head(y.reshape(len(x), -1))


@pytest.mark.thorough
def test_a_model_of_another_library_takes_the_same_steps():
    data = {"x": X[:, :, None].repeat(2, 2).reshape(64, 4, 4, 1), "y": np.arange(64) % 3}
    call = dict(steps=4, batch=16, every=1, quiet=True, lr=0.1)
    plain, explicit = (
        jt.fit(jt.classifier(net), net, data, parallel=FSDP(devices=4, explicit=on), **call)
        for on, net in ((False, Pooled()), (True, Pooled()))
    )
    assert explicit.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-6)
