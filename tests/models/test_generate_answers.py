"""Answers in a batch: those of a row alone, up to the mark, and no step after the last of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.errors import ConfigError
from jtrain.models.generate import generate
from jtrain.models.generate_answers import generate_answers
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


def test_each_row_is_the_answer_that_it_gets_alone():
    text, ends = answers()
    assert ends.tolist() == (LENGTHS + 10).tolist()
    for row, (words, end) in enumerate(zip(text, ends, strict=True)):
        np.testing.assert_array_equal(words[:end], alone(row))
        assert not words[end:].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 1])
def test_an_answer_ends_with_its_first_mark(size):
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


def test_a_mark_in_the_prompt_ends_nothing():
    model = Counting([])
    prompts = jnp.array([[9, 9, 9]])
    text, ends = generate_answers(
        model, {}, prompts, jnp.array([3]), jax.random.key(0), start=1, steps=3, stop=(9, 9)
    )
    assert text[0].tolist() == [9, 9, 9, 10, 11, 12]
    assert ends.tolist() == [6]


def test_draws_are_those_of_the_distribution():
    """Rows with one prompt draw by their own keys: of two equally likely tokens, half each."""

    class Coin(Counting):
        def extend(self, params, cache, tokens, at):
            return jnp.zeros((len(tokens), 2)), cache

    rows = 2000
    prompts, lengths = jnp.ones((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
    text, _ = generate_answers(
        Coin([]), {}, prompts, lengths, jax.random.key(1), start=1, steps=1, temperature=1.0
    )
    spread = 5 * 0.5 / rows**0.5  # five standard deviations
    assert_close(text[:, 1].mean(), 0.5, spread, terms=1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 26}, "answers of 25 tokens"),
        ({"steps": 0}, "steps of 1 or more"),
        ({"start": 0}, r"start in 1 \.\. 7"),
        ({"start": 8}, r"start in 1 \.\. 7"),
        ({"start": 4}, "Set start=3 or less"),  # behind the shortest prompt there is padding
        ({"top_k": -1}, "Give top_k 0 for all tokens"),
        ({"temperature": -1.0}, "Give temperature 0 or more"),
    ],
)
def test_refuses_numbers_out_of_their_range(settings, words):
    given = {"start": 1, "steps": 2, **settings}
    with pytest.raises(ConfigError, match=words):
        generate_answers(Counting([]), {}, PROMPTS, LENGTHS, jax.random.key(0), **given)


def test_a_drawn_token_may_be_larger_than_those_of_the_prompts():
    class Large(Counting):
        def extend(self, params, cache, tokens, at):
            return jax.nn.one_hot(tokens[:, -1] + 1, 300), cache

    prompts = jnp.array([[253, 254]], jnp.uint8)
    how = {"start": 2, "steps": 4, "stop": (257,)}
    text, ends = generate_answers(Large([]), {}, prompts, jnp.array([2]), jax.random.key(0), **how)
    assert (text.tolist(), ends.tolist()) == ([[253, 254, 255, 256, 257, 0]], [5])
