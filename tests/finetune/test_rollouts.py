"""Answers that a model samples: their draws, probabilities, ends and rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.data.text.characters import Vocabulary
from jtrain.errors import LossError
from jtrain.finetune.rollouts import (
    answer_log_probs,
    describe_rollouts,
    sample_answers,
    text_reward,
    until_end,
)
from jtrain.losses.group_policy import advantages_by_row, group_advantages
from jtrain.models.transformer import Transformer
from jtrain.parallel import Mirrored

TEXT = Vocabulary("0123+=\n")
END = int(TEXT.encode("\n")[0])
QUESTIONS = jnp.asarray(np.stack([TEXT.encode(q) for q in ("1+2=", "0+3=", "2+0=")]), jnp.int32)
TOKENS = 4


@functools.cache
def model_and_params():
    model = Transformer(
        vocab=len(TEXT), context=8, layers=1, heads=2, width=16, logit_cap=3.0
    ).build()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    return model, jax.tree.map(lambda x: 3 * x, params)


@functools.cache
def sampler(group):
    model, _ = model_and_params()
    how = {"group": group, "tokens": TOKENS}
    return jax.jit(functools.partial(sample_answers, model, **how))


@functools.cache
def logits():
    model, params = model_and_params()
    return jax.jit(lambda texts: model.apply(params, {}, texts)[0])


def sampled(rows, *, group=5, temperature=0.7):
    _, params = model_and_params()
    keys = jax.random.split(jax.random.key(1), len(QUESTIONS))[rows]
    return sampler(group)(params, QUESTIONS[rows], keys, temperature=jnp.float32(temperature))


def test_an_answer_ends_with_its_first_end():
    answers = jnp.array([[[1, END, 2, END], [END, END, 1, 1], [1, 2, 3, 1]]])
    want = [[[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]]
    np.testing.assert_array_equal(until_end(answers, END), np.bool_(want))


def test_the_answers_of_a_row_do_not_depend_on_the_others():
    complete, rows = sampled(np.arange(3)), np.array([2, 0])
    assert complete.shape == (3, 5, TOKENS)
    np.testing.assert_array_equal(sampled(rows), complete[rows])
    assert len(np.unique(complete[0], axis=0)) > 1, "the answers of a group differ"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_distribution_that_is_sampled(temperature):
    model, params = model_and_params()
    answers = sampled(np.arange(3))
    real = until_end(answers, END)
    score = functools.partial(answer_log_probs, model, temperature=temperature)
    got = jax.jit(score)(params, QUESTIONS, answers, real)
    for row, group in enumerate(np.asarray(answers)):
        texts = np.concatenate([np.tile(QUESTIONS[row], (len(group), 1)), group], axis=1)
        scores = np.float64(logits()(jnp.asarray(texts))) / temperature
        log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        want = np.take_along_axis(log_p[:, 3:-1], group[..., None], -1)[..., 0]
        assert_close(got[row], np.where(real[row], want, 0), 1e-5, terms=scores)


def test_at_no_temperature_the_likeliest_answer_is_given():
    answers = np.asarray(sampled(np.arange(3), group=2, temperature=0.0))
    np.testing.assert_array_equal(answers[:, 0], answers[:, 1])
    text = np.concatenate([QUESTIONS, answers[:, 0]], axis=1)
    scores = logits()(jnp.asarray(text))
    np.testing.assert_array_equal(scores[:, 3:-1].argmax(-1), answers[:, 0])


def test_no_gradient_goes_through_the_sampling():
    model, params = model_and_params()
    keys = jax.random.split(jax.random.key(1), 3)

    def total(params):
        return sample_answers(model, params, QUESTIONS, keys, group=2, tokens=2).sum() * 1.0

    gradient = jax.jit(jax.grad(total))(params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def reward(question: str, answer: str) -> float:
    """Return 1 for the right sum, and half for an answer that is too long."""
    a, b = question.rstrip("=").split("+")
    return 1.0 if answer == str(int(a) + int(b)) else 0.5 * (len(answer) > 1)


ANSWERS = jnp.asarray(
    [
        [TEXT.encode(answer) for answer in pair]
        for pair in (("3\n22", "33\n2"), ("3\n\n\n", "2\n\n\n"), ("\n222", "2\n00"))
    ],
    jnp.int32,
)
REWARDS = [[1, 0.5], [1, 0], [0, 1]]


def test_a_function_of_texts_gives_rewards():
    verify = jax.jit(text_reward(TEXT, END, reward))
    np.testing.assert_array_equal(verify(ANSWERS, {"question": QUESTIONS}), REWARDS)


def test_a_function_of_texts_sees_all_rows_that_are_split_over_devices():
    strategy = Mirrored(devices=2).build()
    rows = np.array([0, 1, 2, 0])
    batch = {"question": np.asarray(QUESTIONS)[rows], "answers": np.asarray(ANSWERS)[rows]}
    placed = strategy.place(batch | {"row": np.arange(4), "mask": np.ones(4, bool)})
    verify = text_reward(TEXT, END, reward)
    got = jax.jit(lambda batch: verify(batch["answers"], batch))(placed)
    np.testing.assert_array_equal(got, np.array(REWARDS, np.float32)[rows])


def test_rollouts_are_readable():
    rollouts = {"question": QUESTIONS, "answers": ANSWERS, "rewards": np.array(REWARDS, np.float32)}
    text = describe_rollouts(rollouts, TEXT, END, rows=2)
    assert text == "'1+2=': '3' 1, '33' 0.5\n'0+3=': '3' 1, '2' 0"


def test_tokens_beyond_the_vocabulary_are_no_text():
    answers = ANSWERS[:1].at[0, 0, 1].set(len(TEXT) + 3)
    rollouts = {"question": QUESTIONS, "answers": answers, "rewards": np.ones((1, 2), np.float32)}
    assert describe_rollouts(rollouts, TEXT, END) == "'1+2=': '322' 1, '33' 1"
    lengths = text_reward(TEXT, END, lambda question, answer: len(question + answer))
    got = jax.jit(lengths)(answers, {"question": QUESTIONS[:1]})
    np.testing.assert_array_equal(got, [[7, 6]])


@pytest.mark.parametrize("by_deviation", [True, False])
def test_advantages_are_those_of_the_host(by_deviation):
    rewards = np.array([[1, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [1, 2, 5, -1]], np.float32)
    groups = np.repeat(np.arange(3), 4)
    want = group_advantages(rewards.ravel(), groups, by_deviation=by_deviation)
    got = jax.jit(functools.partial(advantages_by_row, by_deviation=by_deviation))(rewards)
    assert_close(np.ravel(got), want, 1e-6)
    assert not np.any(got[1])


def test_a_group_of_one_is_refused():
    with pytest.raises(LossError, match=r"one answer.*at least 2"):
        advantages_by_row(jnp.ones((3, 1)))
