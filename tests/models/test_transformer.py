"""The transformer and its options against the same formulas in numpy, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import named_leaves, num_elements
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


FOUR_HEADS = {"vocab": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)
LLAMA3 = {"kind": "llama3", "factor": 8.0, "low": 0.5, "high": 2.0, "context": 16}

# Each option is on in one at least, and most pairs meet.
COMBINATIONS = {
    "like llama": {
        "kv_heads": 2,
        "positions": {"kind": "rotary", "base": 100.0, "scaling": LLAMA3},
        "norm": "rms",
        "activation": "swiglu",
        "hidden": 20,
        "bias": False,
        "tied": False,
        "window": 3,
        "global_every": 2,
    },
    "like gemma": {
        "kv_heads": 1,
        "head_size": 6,
        "positions": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}},
        "norm": "rms",
        "epsilon": 1e-3,
        "activation": "gelu_exact",
        "qk_norm": True,
        "attention_cap": 2.0,
        "logit_cap": 3.0,
    },
    "like none": {
        "positions": {"kind": "none"},
        "activation": "swiglu",
        "qk_norm": True,
        "window": 2,
        "logit_cap": 5.0,
        "epsilon": 1e-2,
    },
    "like gpt": {"kv_heads": 2, "activation": "gelu_exact", "attention_cap": 1.0, "tied": False},
    "gpt": {},
}


def norm(x, p, values):
    centred = x - x.mean(-1, keepdims=True) if values.norm == "layer" else x
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + values.epsilon)
    return y * p["scale"] + p.get("bias", 0)


def linear(x, p):
    kernel = p["kernel"] if p["kernel"].shape[0] == x.shape[-1] else p["kernel"].T
    return x @ kernel + p.get("bias", 0)


def cap(x, to):
    return x if to is None else to * math.tanh(x / to)


def turned(x, position, how):
    """Rotate one head's numbers as complex pairs (i, i + k/2) by their angles."""
    if how.kind != "rotary":
        return x
    half = len(x) // 2
    out = np.zeros_like(x)
    for i in range(half):
        frequency = how.base ** (-2 * i / len(x))
        if how.scaling.kind == "linear":
            frequency /= how.scaling.factor
        elif how.scaling.kind == "llama3":
            frequency = _llama3(frequency, how.scaling)
        z = complex(x[i], x[i + half]) * np.exp(1j * position * frequency)
        out[i], out[i + half] = z.real, z.imag
    return out


def _llama3(frequency, scaling):
    """Scale by wave lengths, as Llama 3.1 publishes it."""
    length = 2 * math.pi / frequency
    if length < scaling.context / scaling.high:
        return frequency
    if length > scaling.context / scaling.low:
        return frequency / scaling.factor
    smooth = (scaling.context / length - scaling.low) / (scaling.high - scaling.low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def attention(x, p, layer, values):
    b, t, _ = x.shape
    groups = values.kv_heads or values.heads
    each, size = values.heads // groups, values.head_size or values.width // values.heads
    together = linear(x, p["qkv"]).reshape(b, t, groups, each + 2, size)
    if values.qk_norm:
        together = together.copy()
        together[..., :each, :] = norm(together[..., :each, :], p["norm_q"], values)
        together[..., each, :] = norm(together[..., each, :], p["norm_k"], values)
    everywhere = values.global_every and (layer + 1) % values.global_every == 0
    window = t if everywhere or values.window is None else values.window
    out = np.zeros((b, t, values.heads, size))
    for row, now, head in np.ndindex(b, t, values.heads):
        group = head // each
        q = turned(together[row, now, group, head % each], now, values.positions)
        seen = range(max(0, now - window + 1), now + 1)
        scores = np.array([
            cap(q @ turned(together[row, s, group, each], s, values.positions) / math.sqrt(size),
                values.attention_cap)
            for s in seen
        ])  # fmt: skip
        chances = np.exp(scores - scores.max())
        out[row, now, head] = chances / chances.sum() @ together[row, list(seen), group, each + 1]
    return linear(out.reshape(b, t, -1), p["out"])


def mlp(x, p, values):
    up = linear(x, p["up"])
    if values.activation == "swiglu":
        gate = linear(x, p["gate"])
        return linear(up * gate / (1 + np.exp(-gate)), p["down"])
    if values.activation == "gelu":
        curve = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return linear(up * (1 + np.tanh(curve)) / 2, p["down"])
    return linear(up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2, p["down"])


def in_numpy(params, tokens, values):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["tokens"][tokens]
    if "positions" in params:
        x = x + params["positions"][: tokens.shape[1]]
    for layer, p in enumerate(params["blocks"].values()):
        x = x + attention(norm(x, p["norm_attention"], values), p, layer, values)
        x = x + mlp(norm(x, p["norm_mlp"], values), p, values)
    logits = norm(x, params["norm"], values) @ params.get("head", params["tokens"]).T
    return np.vectorize(cap)(logits, values.logit_cap) if values.logit_cap else logits


def built(name):
    """Make the config, the model, and parameters far from their initial values."""
    values = Transformer(**FOUR_HEADS, **COMBINATIONS[name])
    model, draw = values.build(), np.random.default_rng(1)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    drawn = lambda x: jnp.asarray(0.5 * draw.standard_normal(x.shape), jnp.float32)
    return values, model, jax.tree.map(drawn, shapes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_gives_the_logits_of_the_formulas_and_its_pieces_do_too(name):
    values, model, params = built(name)

    @jax.jit
    def both(params):
        hidden, extra = model.hidden(params, {}, TEXT)
        assert extra == {}
        return hidden @ model.head(params).T, model.apply(params, {}, TEXT)[0]

    product, logits = both(params)
    expected = in_numpy(params, np.asarray(TEXT), values)
    assert np.abs(expected).max() > 1
    assert_close(logits, expected, 1e-5)
    if values.logit_cap:
        product = values.logit_cap * np.tanh(product / values.logit_cap)
    assert_close(product, logits, 2e-6)


@pytest.mark.thorough
def test_what_is_in_half_precision_is_computed_in_whole():
    """Check that angles, norms, softmax and caps of bfloat16 parameters are those of float32."""
    _, model, params = built("like gemma")
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
