"""Rollouts: groups of answers that a model samples to questions, and their rewards."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jtrain.core.types import Batch, Extra, Params
from jtrain.data.text.tokenizers import Tokenizer, decode_known
from jtrain.losses.preferences import token_log_probs
from jtrain.models.attention import soft_cap
from jtrain.models.generate import generate
from jtrain.models.transformer import LanguageModel

RewardFn: TypeAlias = Callable[[Int[Array, "b g a"], Batch], Float[Array, "b g"]]
"""Reward of each answer to the question of its row: a plain function."""


def sample_answers(
    model: LanguageModel,
    params: Params,
    question: Int[Array, "b q"],
    keys: Shaped[Array, "b"],
    *,
    group: int,
    tokens: int,
    temperature: float = 1.0,
) -> Int[Array, "b g a"]:
    """Return `group` answers of `tokens` tokens to each question; no gradient goes through them.

    The draws of a row follow from its key, so that they are the same in any batch.
    """
    rows = len(question)
    number = jnp.arange(group)
    each = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, number)
    text = generate(
        model,
        jax.lax.stop_gradient(params),
        jnp.repeat(question, group, axis=0),
        each.reshape(-1),
        steps=tokens,
        temperature=temperature,
    )
    return text[:, question.shape[1] :].reshape(rows, group, tokens)


def until_end(answers: Int[Array, "b g a"], end: int) -> Bool[Array, "b g a"]:
    """Return which tokens belong to an answer: those up to its first `end`, which is included."""
    ends = (answers == end).astype(jnp.int32)
    return jnp.cumsum(ends, axis=-1) - ends == 0


def answer_log_probs(
    model: LanguageModel,
    params: Params,
    question: Int[Array, "b q"],
    answers: Int[Array, "b g a"],
    real: Bool[Array, "b g a"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "b g a"]:
    """Return the log probability of each real token of the answers, and 0 for the others.

    It is that of the distribution that is sampled: of the logits divided by `temperature`.
    """
    rows, group, tokens = answers.shape
    start = question.shape[1]
    flat = answers.reshape(rows * group, tokens)
    text = jnp.concatenate([jnp.repeat(question, group, axis=0), flat], axis=1)
    hidden, _ = model.hidden(params, {}, text[:, :-1])
    logits = jnp.einsum("btd,vd->btv", hidden[:, start - 1 :], model.head(params))
    logits = soft_cap(logits, model.logit_cap) / temperature
    return token_log_probs(logits, flat, real.reshape(flat.shape)).reshape(answers.shape)


def text_reward(tokenizer: Tokenizer, end: int, score: Callable[[str, str], float]) -> RewardFn:
    """Return the reward of a Python function of texts, `(question, answer) -> reward`.

    It runs on the host, within the step; the answer is without its end. A function of arrays runs
    on the device, and `jtrain check` sees into it.
    """

    def on_host(question: np.ndarray, answers: np.ndarray) -> np.ndarray:
        rewards = np.zeros(answers.shape[:2], np.float32)
        for row, group in enumerate(answers):
            asked = tokenizer.decode(question[row])
            rewards[row] = [score(asked, _decode(tokenizer, each, end)) for each in group]
        return rewards

    def reward(answers: Int[Array, "b g a"], batch: Batch) -> Float[Array, "b g"]:
        shape = jax.ShapeDtypeStruct(answers.shape[:2], jnp.float32)
        return jax.pure_callback(on_host, shape, batch["question"], answers)

    return reward


def init_rollouts(rows: int, group: int, question: int, answer: int) -> Extra:
    """Return the record of the rollouts of a batch of `rows` questions, before the first."""
    return {
        "question": jnp.zeros((rows, question), jnp.int32),
        "answers": jnp.zeros((rows, group, answer), jnp.int32),
        "log_probs": jnp.zeros((rows, group, answer), jnp.float32),
        "rewards": jnp.zeros((rows, group), jnp.float32),
    }


def describe_rollouts(rollouts: Extra, tokenizer: Tokenizer, end: int, *, rows: int = 4) -> str:
    """Return the first recorded questions, with the answers to each and their rewards, as text."""
    arrays = jax.device_get(rollouts)
    lines = []
    for question, answers, rewards in zip(
        arrays["question"][:rows], arrays["answers"], arrays["rewards"], strict=False
    ):
        texts = [repr(_decode(tokenizer, answer, end)) for answer in answers]
        scored = [f"{text} {reward:g}" for text, reward in zip(texts, rewards, strict=True)]
        lines.append(f"{tokenizer.decode(question)!r}: {', '.join(scored)}")
    return "\n".join(lines)


def _decode(tokenizer: Tokenizer, answer: np.ndarray, end: int) -> str:
    at = np.flatnonzero(answer == end)
    return decode_known(tokenizer, answer[: at[0]] if len(at) else answer)
