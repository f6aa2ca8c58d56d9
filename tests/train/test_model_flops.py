"""Model FLOPs are those of closed forms, whatever the backward pass computes again."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.models.attention.positions import NoPositions, Rotary
from jtrain.models.cnn import CNN
from jtrain.models.experts.experts import Capacity, Dropless
from jtrain.models.mlp import MLP
from jtrain.models.transformer import Transformer
from jtrain.train.flops import count_flops
from jtrain.train.model_flops import count_model_flops

B, T, VOCAB, WIDTH, LAYERS = 2, 16, 32, 16, 3


def shapes(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def weights(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def total(model, **options):
    """A loss of a model: the sum of its outputs' squares."""

    def loss(params, extra, *inputs):
        outputs, _ = model.apply(params, extra, *inputs, **options)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return jnp.square(outputs).sum()

    return loss


def counted(model, *inputs):
    params, extra = weights(model)
    loss = total(model)
    model_flops = count_model_flops(loss, params, extra, *inputs)
    return model_flops, count_flops(jax.grad(loss), params, extra, *inputs)


def test_a_perceptron():
    widths = (8, 12, 10, 3)
    model = MLP(inputs=8, widths=widths[1:-1], classes=3).build()
    maps = [2 * 5 * a * b for a, b in itertools.pairwise(widths)]
    assert counted(model, shapes(5, 8)) == (3 * sum(maps) - maps[0],) * 2


def test_convolutions():
    model = CNN(image=(8, 8, 3), channels=(4, 6), classes=5).build()
    # 3x3 kernels at 8x8 and 4x4 places, a map of 2x2x6 to the classes.
    first, second = 2 * (8 * 8) * 9 * 3 * 4, 2 * (4 * 4) * 9 * 4 * 6
    by_hand = 7 * (2 * first + 3 * second + 3 * 2 * (2 * 2 * 6) * 5)
    assert counted(model, shapes(7, 8, 8, 3))[0] == by_hand


def transformer(**changes):
    sizes = {"vocab": VOCAB, "context": T, "layers": LAYERS, "heads": 4, "width": WIDTH}
    return Transformer(**{**sizes, **changes}).build()


def transformer_flops(*, hidden=4 * WIDTH, kernels=2, groups=4, head=4, tokens=B * T):
    """Forward pass: maps of queries, keys, values and output, scores and their sums, the MLP."""
    attention = 2 * tokens * WIDTH * head * (4 + 2 * groups + 4) + 2 * 2 * tokens * T * 4 * head
    feed = 2 * tokens * WIDTH * hidden * kernels
    return LAYERS * (attention + feed) + 2 * tokens * WIDTH * VOCAB


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"kv_heads": 2, "activation": "swiglu"}, {"groups": 2, "kernels": 3}),
        ({"norm": "rms", "tied": False, "hidden": 40, "qk_norm": True}, {"hidden": 40}),
        ({"scan": True, "remat": "full"}, {}),
        ({"remat": "dots", "head_size": 8}, {"head": 8}),
        ({"window": 4, "logit_cap": 30.0, "attention_cap": 20.0}, {}),
        ({"positions": Rotary(), "bias": False, "qkv_bias": True, "dropout": 0.1}, {}),
        ({"positions": NoPositions(), "window": 4, "global_every": 2}, {}),
        ({"post_norm": True, "activation": "geglu", "zero_centered": True}, {"kernels": 3}),
        ({"remat": "names", "saved": ("qkv", "attention")}, {}),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_a_transformer(changes, options):
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    model_flops, hardware = counted(transformer(**changes), tokens)
    # Every factor of every product depends on a parameter: three times the forward pass.
    assert model_flops == 3 * transformer_flops(**options)
    # Computed again: a block without its last product, or what is not saved of it.
    wide = LAYERS * 2 * (B * T) * WIDTH * 4 * WIDTH
    logits = 2 * (B * T) * WIDTH * VOCAB
    scores, out = LAYERS * 2 * B * T * T * WIDTH, LAYERS * 2 * (B * T) * WIDTH * WIDTH
    again = {"full": transformer_flops() - logits - wide, "names": scores + out + wide}
    if (remat := changes.get("remat")) in again:
        assert hardware == model_flops + again[remat]
    else:
        assert hardware < 1.1 * model_flops


@pytest.mark.parametrize(
    ("experts", "rows"),
    [
        (Dropless(count=4, top_k=2), 2 * B * T),
        (Capacity(count=4, top_k=2, factor=1.25), 4 * B * 10),  # all places, also empty ones
    ],
    ids=["dropless", "capacity"],
)
def test_experts_count_for_the_rows_that_they_get(experts, rows):
    model = transformer(experts=experts, layers=LAYERS)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    router = B * T * 4
    routed = LAYERS * 2 * WIDTH * (rows * 2 * 4 * WIDTH + router)
    dense = LAYERS * 2 * (B * T) * WIDTH * 2 * 4 * WIDTH
    by_hand = 3 * (transformer_flops() - dense + routed)
    assert counted(model, tokens)[0] == pytest.approx(by_hand, rel=0.01)


def test_a_loss_in_chunks_counts_its_logits_once():
    head, hidden = shapes(VOCAB, WIDTH), shapes(B, T, WIDTH)
    targets = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def loss(params, targets, real):
        return chunked_next_token(*params, targets, real, chunk=8)[0].total

    args = (hidden, head), targets, jax.ShapeDtypeStruct((B, T), jnp.bool)
    assert count_model_flops(loss, *args) == 3 * 2 * B * T * WIDTH * VOCAB


def scanned(kernels, x):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0].sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["", "remat", "jit"])
def test_a_scan_counts_each_iteration(wrap):
    kernels, x = shapes(6, 8, 8), shapes(4, 8)
    # The first of the six products has an input that is not differentiated, but the loop is one
    # program: its gradient takes both products in every iteration.
    assert count_model_flops(wrap(scanned), kernels, x) == 3 * 6 * 2 * 4 * 8 * 8


def test_a_penalty_on_a_gradient_is_the_gradient_of_a_gradient():
    first, second, x = shapes(8, 16), shapes(16, 4), shapes(32, 8)
    energy = lambda p, x: jnp.square(jnp.tanh(x @ p[0]) @ p[1]).sum()
    penalty = lambda p, x: jnp.square(jax.grad(energy, 1)(p, x)).sum()
    one, two = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    # The penalty takes both products twice. Its gradient takes two more for each of these four, but
    # one for that of the rows, which get no gradient.
    by_hand = 2 * (one + two) + 2 * (one + two + two) + one
    assert count_model_flops(penalty, (first, second), x) == by_hand
    assert count_flops(jax.grad(penalty), (first, second), x) == by_hand


def test_what_gets_no_gradient_is_counted_once():
    first, second, x = shapes(8, 16), shapes(16, 4), shapes(32, 8)
    one, two = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    frozen = lambda p, q, x: ((x @ q) @ p).sum()
    behind_a_stop = lambda p, q, x: (jax.lax.stop_gradient(x @ q) @ p).sum()
    assert count_model_flops(frozen, second, first, x) == one + 2 * two
    assert count_model_flops(behind_a_stop, second, first, x) == one + 2 * two
    teacher = lambda p, x: ((jax.lax.stop_gradient(x @ p[0]) @ p[1]) @ p[1].T).sum()
    assert count_model_flops(teacher, (first, second), x) == 2 * one + (2 + 3) * two


def test_the_dearest_branch_counts():
    kernel, x = shapes(8, 8), shapes(4, 8)
    branch = lambda p, x: jax.lax.cond(x.sum() > 0, lambda: (x @ p).sum(), lambda: x.sum())
    assert count_model_flops(branch, kernel, x) == 2 * 2 * 4 * 8 * 8


def test_a_loop_without_a_count_and_an_unknown_kernel_are_unknown():
    kernel, x = shapes(8, 8), shapes(4, 8)
    until = lambda p, x: jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y @ p, x).sum()
    assert count_model_flops(until, kernel, x) is None
    unknown = Primitive("pallas_call")
    unknown.def_abstract_eval(lambda x, name: x)
    with_kernel = lambda p, x: unknown.bind(x @ p, name="mine").sum()
    assert count_model_flops(with_kernel, kernel, x) is None
    product = 2 * 4 * 8 * 8
    assert count_model_flops(until, kernel, x, lower_bound=True) == 3 * product  # by y and by p
    assert count_model_flops(with_kernel, kernel, x, lower_bound=True) == 2 * product


def test_the_splash_kernel_counts_as_attention_written_out():
    from jtrain.models.attention.splash import splash

    options = {"window": None, "soft_cap": None, "scale": 0.1, "segments": None}
    attend = lambda qkv: splash(*qkv, **options).sum()
    qkv = (shapes(2, 128, 4, 64),) * 3
    square = 2 * 2 * 4 * 128 * 128 * 64
    assert count_model_flops(attend, qkv) == 3 * 2 * square
    # The two backward kernels compute the scores and their gradient each.
    assert count_flops(jax.grad(attend), qkv) == pytest.approx((2 + 3 + 4) * square, rel=2e-3)
