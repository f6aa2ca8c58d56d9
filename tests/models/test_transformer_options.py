"""The transformer's options against the same formulas in numpy, position by position, in float64."""
# ruff: noqa: E501  (a case reads best on a line)

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.config.explain import explain
from jtrain.config.resolve import resolve
from jtrain.config.schema import field_schemas
from jtrain.models.transformer import Transformer

SIZES = {"vocab": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)
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
    values = Transformer(**SIZES, **COMBINATIONS[name])
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
        hidden, extra = model.hidden(params, {}, TOKENS)
        assert extra == {}
        return hidden @ model.head(params).T, model.apply(params, {}, TOKENS)[0]

    product, logits = both(params)
    expected = in_numpy(params, np.asarray(TOKENS), values)
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
    got = apply(half, {}, TOKENS)[0]
    want = apply(whole, {}, TOKENS)[0]
    assert got.dtype == jnp.bfloat16
    apart = np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want)
    assert apart < 0.03  # 8 bits: 0.4 % a rounding, a few dozen of them


REFUSED = {
    "kv_heads": ({"kv_heads": 3}, r"3 kv_heads do not divide 4 heads. Nearest: kv_heads=2\.", {"kv_heads": 2}),
    "odd heads": ({"width": 12, "positions": {"kind": "rotary"}}, r"a head has 3: an odd number. Set head_size=4",
                  {"width": 12, "head_size": 4, "positions": {"kind": "rotary"}}),
    "no window": ({"global_every": 2}, r"global_every=2 lifts a window, and there is none. Set window=1024",
                  {"global_every": 2, "window": 1024}),
    "windows in a scan": ({"global_every": 2, "window": 4, "scan": True}, r"Set scan=false or global_every=0",
                          {"global_every": 2, "window": 4}),
    "no names": ({"remat": "names"}, r"remat=names with saved=\[\].*Set remat=names and saved=\[qkv, attention\]",
                 {"remat": "names", "saved": ("qkv", "attention")}),
    "names for nothing": ({"saved": ("qkv",)}, r"remat=none with saved=\[qkv\].*remat=none and saved=\[\]", {}),
    "a window of nothing": ({"window": 0}, r"window\n.*greater than 0", {"window": 1}),
    "scaling": ({"positions": {"kind": "rotary", "scaling": {**LLAMA3, "low": 4.0}}},
                r"from low=4\.0 to high=2\.0 turns.*low must be below high", {"positions": {"kind": "rotary"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_refused_and_the_advice_works(name):
    wrong, words, mended = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        Transformer(**{**SIZES, **wrong})
    assert Transformer(**{**SIZES, **mended})


def test_a_vocabulary_smaller_than_the_data_s_is_refused():
    with pytest.raises(
        ValueError, match=r"vocab=11 is smaller than the 65.*Set model.vocab=65, or"
    ):
        Transformer(**SIZES).for_tokens(65)
    assert Transformer(vocab=65).for_tokens(65).vocab == 65
    assert Transformer(vocab=0).for_tokens(65).vocab == 65
    assert Transformer(vocab=70).for_tokens(65).vocab == 70


def test_a_vocabulary_far_larger_than_the_data_is_reported(caplog):
    assert Transformer(preset="gpt2").for_tokens(1001).vocab == 50257
    assert "model.vocab=0 takes those of the data" in caplog.text
    caplog.clear()
    assert Transformer(preset="gpt2", vocab=0).for_tokens(1001).vocab == 1001
    Transformer(vocab=50304).for_tokens(50257)
    assert not caplog.text


def test_the_experiment_of_language_takes_the_vocabulary_of_the_data():
    settings = ("data={kind: random, vocab: 1000, context: 16}", "optimizer.lr=1e-3", "steps=1")
    config = Path(__file__).parents[2] / "configs" / "gpt2.yaml"
    schema = resolve(config, settings).schema
    assert field_schemas(schema)["model"].default.for_tokens(1000).vocab == 1000
    assert "default 0" in explain(schema, "model.vocab")
    assert "default 1024" in explain(schema, "model.context"), "the preset's, as a run has it"
