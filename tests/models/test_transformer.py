"""The transformer against the same formulas in numpy, in float64."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import named_leaves
from jtrain.models.transformer import Transformer

SIZES = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 8)).astype(np.int32)


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return y * p["scale"] + p.get("bias", 0)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, block, heads):
    b, t, d = x.shape
    together = x @ block["qkv"]["kernel"] + block["qkv"].get("bias", 0)
    together = together.reshape(b, t, heads, 3, d // heads)
    out = np.zeros((b, t, heads, d // heads))
    for row in range(b):
        for head in range(heads):
            q, k, v = (together[row, :, head, i] for i in range(3))
            for now in range(t):
                scores = np.exp(q[now] @ k[: now + 1].T / math.sqrt(d // heads))
                out[row, now, head] = scores / scores.sum() @ v[: now + 1]
    return out.reshape(b, t, d) @ block["out"]["kernel"] + block["out"].get("bias", 0)


def in_numpy(params, tokens, heads):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"].values():
        x = x + attention(norm(x, block["norm_attention"]), block, heads)
        up = norm(x, block["norm_mlp"]) @ block["up"]["kernel"] + block["up"].get("bias", 0)
        x = x + gelu(up) @ block["down"]["kernel"].T + block["down"].get("bias", 0)
    return norm(x, params["norm"]) @ params.get("head", params["tokens"]).T


def spread(params):
    """Make parameters far from their initial values, so that no part is nearly zero."""
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.3 * draw.standard_normal(x.shape, np.float32), params)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"tied": False, "bias": False}, {}], ids=str)
def test_gives_the_logits_of_the_formulas(options):
    model = Transformer(**SIZES, **options).build()
    params = spread(jax.jit(model.init)(jax.random.key(0))[0])
    logits, extra = jax.jit(model.apply, static_argnames="train")(params, {}, TOKENS)
    expected = in_numpy(params, TOKENS, SIZES["heads"])
    assert extra == {}
    assert np.abs(expected).max() > 1
    assert_close(logits, expected, 1e-5)


def test_no_position_sees_what_comes_after_it():
    model = Transformer(**SIZES).build()
    params = spread(jax.jit(model.init)(jax.random.key(0))[0])
    apply = jax.jit(model.apply, static_argnames="train")
    changed = TOKENS.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = (apply(params, {}, x)[0] for x in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 0.1


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


def test_heads_that_do_not_divide_the_width_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"5 heads do not divide width 128. Nearest: heads=4\."):
        Transformer(heads=5)
    assert Transformer(heads=4).heads == 4


def test_a_vocabulary_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"vocab=0 has no tokens.*Set model\.vocab\."):
        Transformer().build()


def test_a_sequence_longer_than_the_context_is_refused():
    model = Transformer(**SIZES).build()
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    long = jnp.zeros((1, 9), jnp.int32)
    with pytest.raises(ValueError, match=r"9 tokens is longer.*context of 8. Set model.context=9"):
        jax.eval_shape(lambda p: model.apply(p, {}, long), params)


@pytest.mark.thorough
def test_values_are_read_without_flax():
    code = "import sys, jtrain.models.transformer, jtrain.models.mlp; print('flax' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
