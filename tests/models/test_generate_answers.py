"""Answers in a batch, each as its row alone has it, and how often tokens are drawn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.generate import draw, generate, generate_answers
from jtrain.models.transformer import Transformer

MODEL = Transformer(context=24, layers=1, heads=2, width=16, vocab=11)
DRAW = np.random.default_rng(0)
LENGTHS = jnp.array([3, 5, 4, 7])
PROMPTS = jnp.asarray(DRAW.integers(1, 11, (4, 7)), jnp.int32)


@functools.cache
def built():
    model = MODEL.build()
    params, _ = model.init(jax.random.key(0))
    return model, jax.tree.map(lambda leaf: 5 * leaf, params)


def answers(stop=(), steps=10):
    model, params = built()
    text, ends = generate_answers(
        model, params, PROMPTS, LENGTHS, jax.random.key(0), start=3, steps=steps, stop=stop
    )
    return np.asarray(text), np.asarray(ends)


@functools.cache
def alone(row, steps=10):
    """Return the greedy answer to one prompt, by the generator for prompts of one length."""
    model, params = built()
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


@dataclasses.dataclass(frozen=True)
class Counting:
    """A model that says the next number, and counts its steps."""

    steps: list
    context: int = 32
    __hash__ = object.__hash__

    def empty(self, params, rows):
        return jnp.zeros(rows)

    def extend(self, params, cache, tokens, at):
        jax.debug.callback(lambda at: self.steps.append(int(at)), at)
        return jax.nn.one_hot(tokens[:, -1] + 1, 30), cache


@pytest.mark.thorough
def test_no_step_is_taken_after_the_last_mark():
    model = Counting([])
    prompts = jnp.array([[1, 2, 0], [4, 5, 6]])
    call = functools.partial(generate_answers, model, {}, prompts, jnp.array([2, 3]))
    text, ends = call(jax.random.key(0), start=2, steps=20, stop=(9,))
    jax.effects_barrier()
    assert text[0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert text[1, :7].tolist() == [4, 5, 6, 7, 8, 9, 0]
    assert ends.tolist() == [9, 6]
    assert sorted(model.steps) == [0, 2, 3, 4, 5, 6, 7, 8]  # of 22 without a mark


CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
DRAWS = 4000


def _count(temperature, top_p, top_k):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(CHANCES, jnp.float32)), (DRAWS, 5))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    tokens = draw(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)
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


@pytest.mark.thorough
def test_a_row_draws_by_its_own_key():
    logits, keys = jnp.zeros((6, 50)), jax.random.split(jax.random.key(1), 6)
    whole, part = jax.jit(lambda x, k: (draw(x, k), draw(x[2:4], k[2:4])))(logits, keys)
    np.testing.assert_array_equal(part, whole[2:4])
    assert len(set(whole.tolist())) > 1
