"""Answers that a model samples, and the reference that they are compared with."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from comparison import assert_close, bitwise
from quick_study import config_of
from tiny_configs import TINY

import jtrain as jt
from jtrain.core.pytree import named_leaves
from jtrain.data.text.tokenizers import Vocabulary
from jtrain.finetune.answers import answer_log_probs, sample_answers, until_end
from jtrain.finetune.group_policy import text_reward
from jtrain.losses.group_policy import advantages_by_row, group_advantages
from jtrain.models.transformer import Transformer
from jtrain.train.program import set_up

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


@pytest.mark.thorough
def test_the_answers_of_a_row_do_not_depend_on_the_others():
    complete, rows = sampled(np.arange(3)), np.array([2, 0])
    assert complete.shape == (3, 5, TOKENS)
    np.testing.assert_array_equal(sampled(rows), complete[rows])
    assert len(np.unique(complete[0], axis=0)) > 1, "the answers of a group differ"


@pytest.mark.thorough
def test_log_probs_are_those_of_the_distribution_that_is_sampled():
    temperature = 0.7
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


@pytest.mark.thorough
def test_a_function_of_texts_gives_rewards():
    verify = jax.jit(text_reward(TEXT, END, reward))
    np.testing.assert_array_equal(verify(ANSWERS, {"question": QUESTIONS}), REWARDS)


@pytest.mark.thorough
def test_advantages_are_those_of_the_host():
    rewards = np.array([[1, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [1, 2, 5, -1]], np.float32)
    groups = np.repeat(np.arange(3), 4)
    want = group_advantages(rewards.ravel(), groups, by_deviation=True)
    got = jax.jit(functools.partial(advantages_by_row, by_deviation=True))(rewards)
    assert_close(np.ravel(got), want, 1e-6)
    assert not np.any(got[1])


CONFIG = Path(__file__).parents[2] / "configs" / "grpo.yaml"
TINY_GRPO = (*TINY["grpo"], "parallel={kind: single}", "policy.group=2", "policy.beta=0.3")
LORA = "lora={rank: 2, on: ['*kernel', tokens]}"


@pytest.mark.thorough
def test_under_lora_the_policy_leaves_the_model_without_terms():
    program = set_up(config_of(CONFIG, [*TINY_GRPO, LORA]))
    x, first = program.resolved.experiment, program.initial_state()
    step, batch = (
        jax.jit(jt.make_step(x.loss, x.transformation)),
        jax.tree.map(jnp.asarray, x.train[0]),
    )
    after, metrics = step(first, batch)
    assert metrics["divergence"].value() == 0
    assert bitwise(after.extra["rest"]["reference"], first.params)
    moved = dataclasses.replace(after, params=jax.tree.map(lambda x: x + 0.1, after.params))
    after, metrics = step(moved, batch)
    assert metrics["divergence"].value() > 0
    assert not bitwise(after.params, moved.params), "it is pulled back"
    assert bitwise(after.extra["rest"]["reference"], first.params)
    assert bitwise(after.extra["base"], first.extra["base"])


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, True])
def test_a_loss_makes_its_state_from_loaded_weights(tmp_path, monkeypatch, lora):
    monkeypatch.chdir(tmp_path)
    golden = published.golden("llama31")
    published.write_model(tmp_path / "hf", golden)
    settings = ["model={from: hf}", *([LORA] if lora else [])]
    program = set_up(config_of(CONFIG, [*TINY_GRPO, *settings]))
    state = program.initial_state()
    rest = state.extra["rest"] if lora else state.extra
    assert bitwise(rest["reference"], state.params)
    assert not rest["rollouts"]["answers"].any()
    loaded = named_leaves(state.extra["base"] if lora else state.params)
    assert program.stored_weights is not None
    assert set(program.stored_weights.loaded) == set(loaded)
