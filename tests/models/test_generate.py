"""Texts written token by token: caches, drawn tokens, and answers in a batch."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.models.generate import draw, generate, generate_answers
from jtrain.models.transformer import Transformer

pytestmark = pytest.mark.thorough


@dataclasses.dataclass(frozen=True)
class UncachedModel:
    """Logits `(params, tokens b t) -> b t v`, all computed again each step."""

    logits: Callable[..., jax.Array]
    context: int

    def empty(self, params, rows):
        del params
        return jnp.zeros((rows, self.context), jnp.int32)

    def extend(self, params, cache, tokens, at):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens.astype(cache.dtype), at, axis=1)
        last = at + tokens.shape[1] - 1
        scores = self.logits(params, cache)
        return jax.lax.dynamic_index_in_dim(scores, last, axis=1, keepdims=False), cache


def by_window(params, window):
    """Predict the first token of the window with certainty, which shows the window of a step."""
    del params
    return 100 * jax.nn.one_hot(jnp.broadcast_to(window[:, :1], window.shape), 7)


def write(logits, prompt, *, context, steps, **how):
    key = jax.random.key(0)
    return generate(UncachedModel(logits, context), 0, jnp.array(prompt), key, steps=steps, **how)


def test_a_full_context_goes_on_from_its_last_half():
    # 1 2 3 4 is full after its first token drawn, 1: then 4 1 is read once more, and so on.
    text = write(by_window, [[1, 2, 3, 4]], context=4, steps=6)
    np.testing.assert_array_equal(text, [[1, 2, 3, 4, 1, 4, 4, 4, 4, 4]])


def test_of_a_prompt_longer_than_the_context_the_end_is_seen():
    text = write(by_window, [[1, 2, 3, 4, 5, 6]], context=4, steps=1)
    np.testing.assert_array_equal(text, [[1, 2, 3, 4, 5, 6, 3]])


SIZES = {"vocab": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}
MODELS = {
    "like gpt": {},
    "like llama": {"kv_heads": 2, "positions": {"kind": "rotary"}, "norm": "rms",
        "activation": "swiglu", "bias": False, "tied": False, "window": 3, "global_every": 2},
    "like gemma, stacked": {"kv_heads": 1, "positions": {"kind": "none"}, "qk_norm": True,
        "window": 4, "attention_cap": 2.0, "logit_cap": 3.0, "scan": True},
}  # fmt: skip


@functools.cache
def built(name):
    """Make a model and parameters far from their initial values."""
    model, draw = Transformer(**SIZES, **MODELS[name]).build(), np.random.default_rng(1)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    drawn = lambda x: jnp.asarray(0.5 * draw.standard_normal(x.shape), jnp.float32)
    return model, jax.tree.map(drawn, shapes)


def test_keys_of_rows_draw_the_same_in_any_batch():
    uniform = lambda params, window: jnp.zeros((*window.shape, 7))
    model, prompt = UncachedModel(uniform, 6), jnp.array([[1, 2], [3, 4], [5, 6], [1, 2]])
    keys = jax.random.split(jax.random.key(3), 4)
    text = generate(model, 0, prompt, keys, steps=6)
    order = np.array([2, 0])
    some = generate(model, 0, prompt[order], keys[order], steps=6)
    np.testing.assert_array_equal(some, text[order])
    assert (text[0] != text[3]).any(), "one prompt, two keys"


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_logits_that_reading_all_once_more_gives(name):
    model, params = built(name)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)

    @jax.jit
    def both(params):
        whole, _ = model.apply(params, {}, tokens)
        first, cache = model.extend(params, model.empty(params, 2), tokens[:, :3], 0)
        # Three at once, then one by one: prefill, and a token a step.
        more = lambda cache, at: model.extend(
            params, cache, jax.lax.dynamic_slice_in_dim(tokens, at, 1, 1), at
        )[::-1]
        _, rest = jax.lax.scan(more, cache, jnp.arange(3, 8))
        return whole[:, 2:], jnp.concatenate([first[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)

    whole, cached = both(params)
    assert np.abs(whole).max() > 1
    assert_close(cached, whole, 5e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "like llama" else pytest.mark.slow) for n in MODELS]
)
def test_a_text_is_the_same_with_and_without_a_cache_past_the_context_too(name):
    model, params = built(name)
    plain = UncachedModel(lambda params, x: model.apply(params, {}, x)[0], 8)
    prompt = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    cached, read = (
        jt.generate(m, params, prompt, jax.random.key(0), steps=12, top_k=9, top_p=0.99)
        for m in (model, plain)
    )
    np.testing.assert_array_equal(cached, read)
    assert cached.shape == (2, 15)
    assert len(set(np.asarray(cached)[:, 3:].ravel().tolist())) > 3, "it said but one thing"


def test_a_drawn_token_may_be_larger_than_those_of_the_prompt():
    """A prompt of bytes, of a model whose vocabulary has 300 tokens: none counts from 0 again."""
    next_one = lambda params, window: 100 * jax.nn.one_hot(window + 1, 300)
    prompt = jnp.array([[253]], jnp.uint8)
    text = generate(UncachedModel(next_one, 8), 0, prompt, jax.random.key(0), steps=5)
    assert text.tolist() == [[253, 254, 255, 256, 257, 258]]


MODEL = Transformer(context=24, layers=1, heads=2, width=16, vocab=11)
DRAW = np.random.default_rng(0)
LENGTHS = jnp.array([3, 5, 4, 7])
PROMPTS = jnp.asarray(DRAW.integers(1, 11, (4, 7)), jnp.int32)


@functools.cache
def answering():
    model = MODEL.build()
    params, _ = model.init(jax.random.key(0))
    return model, jax.tree.map(lambda leaf: 5 * leaf, params)


def answers(stop=(), steps=10):
    model, params = answering()
    text, ends = generate_answers(model, params, PROMPTS, LENGTHS, start=3, steps=steps, stop=stop)
    return np.asarray(text), np.asarray(ends)


@functools.cache
def alone(row, steps=10):
    """Return the greedy answer to one prompt, by the generator for prompts of one length."""
    model, params = answering()
    prompt = PROMPTS[row : row + 1, : LENGTHS[row]]
    text = generate(model, params, prompt, jax.random.key(0), steps=steps, temperature=0.0)
    return np.asarray(text)[0]


@pytest.mark.thorough
def test_each_row_is_the_answer_that_it_gets_alone():
    text, ends = answers()
    assert ends.tolist() == (LENGTHS + 10).tolist()
    for row, (words, end) in enumerate(zip(text, ends, strict=True)):
        np.testing.assert_array_equal(words[:end], alone(row))
        assert not words[end:].any()


@pytest.mark.thorough
def test_an_answer_ends_with_its_first_mark():
    size = 2
    first = alone(1)[LENGTHS[1] :]
    stop = tuple(int(token) for token in first[2 : 2 + size])
    text, ends = answers(stop)
    for row, (words, end) in enumerate(zip(text, ends, strict=True)):
        full = alone(row)
        places = range(LENGTHS[row] + size, len(full) + 1)
        marks = [end for end in places if tuple(full[end - size : end]) == stop]
        assert end == (marks[0] if marks else len(full))
        np.testing.assert_array_equal(words[:end], full[:end])
        assert not words[end:].any()
    assert ends[1] <= LENGTHS[1] + 2 + size


CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
DRAWS = 4000


def _count(temperature, top_p, top_k):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(CHANCES, jnp.float32)), (DRAWS, 5))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    tokens = draw(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p).tokens
    return jnp.bincount(tokens, length=5)


COUNT = jax.jit(_count, static_argnums=2)


def shares(temperature=1.0, top_p=1.0, top_k=0):
    counts = COUNT(jnp.float32(temperature), jnp.float32(top_p), top_k)
    return np.asarray(counts) / DRAWS


def of(*kept, power=1.0):
    """Return the probabilities of these tokens."""
    chances = np.where(np.isin(np.arange(5), kept), CHANCES, 0) ** power
    return np.where(np.isin(np.arange(5), kept), chances / chances.sum(), 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"temperature": 0.5}, of(0, 1, 2, 3, 4, power=2)),
        ({"temperature": 0.0}, of(1)),
        ({"top_p": 0.66}, of(1, 3, 4)),
        ({"top_k": 3, "top_p": 0.7}, of(1, 3)),
    ],
    ids=str,
)
def test_draws_as_often_as_the_chances_say(how, expected):
    # 4000 draws: 4 standard errors are 0.032.
    got = shares(**how)
    assert_close(got, expected, 0.032, terms=1)
    assert (got[expected == 0] == 0).all()
