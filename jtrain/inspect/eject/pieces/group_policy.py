"""GRPO: answers that the model samples, rewarded where they are right."""

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.cross_entropy import cross_entropy
from jtrain.inspect.eject.pieces.layers import row_keys
from jtrain.inspect.eject.pieces.sums import sum_rows
from jtrain.inspect.eject.pieces.transformer import TIED, hidden_states

GROUP: int = 8  # answers to a question, whose mean reward is the baseline
ANSWER: int = 4  # most tokens of an answer
MARK: int = 12  # the token that ends an answer
TEMPERATURE: float = 1.0
BELOW: float = 0.2  # how far a ratio of probabilities counts below 1
ABOVE: float = 0.2


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, equations 3 and 4.
    """
    answers = sample(jax.lax.stop_gradient(params), batch["question"], row_keys(key, batch))
    own_end = until_end(answers)
    right = jnp.where(own_end, answers == batch["answer"][:, None], True).all(-1)
    rewards = right.astype(jnp.float32)  # b g
    real = own_end & batch["mask"][:, None, None]
    log_probs = score(params, batch["question"], answers, real)
    values = jax.vmap(group_loss)(log_probs, advantages_of(rewards), real)
    return [(1.0, *sum_rows(values, batch["mask"]))], extra


def logits_of(params, text, first):
    """Return the logits of the next token from a position on, b t v."""
    hidden, _ = hidden_states(params, text, None)
    logits = jnp.einsum("btd,vd->btv", hidden[:, first:], params["tokens" if TIED else "head"])
    return logits / TEMPERATURE


def sample(params, question, keys):
    """Return answers b g a, drawn by the keys of the rows; the text is read anew for each token."""
    (rows, start), number = question.shape, jnp.arange(GROUP)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, number).reshape(-1)
    text = jnp.zeros((rows * GROUP, start + ANSWER), question.dtype)
    text = text.at[:, :start].set(jnp.repeat(question, GROUP, axis=0))

    def grow(position, text):
        logits = jax.lax.dynamic_index_in_dim(logits_of(params, text, 0), position - 1, 1, False)
        # The draw is among the tokens by their chances, as for top-k and top-p sampling.
        ordered, order = jax.lax.top_k(logits, logits.shape[-1])
        at = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        drawn = jax.vmap(jax.random.categorical)(at, ordered)
        token = jnp.take_along_axis(order, drawn[:, None], axis=-1).astype(text.dtype)
        return jax.lax.dynamic_update_slice_in_dim(text, token, position, axis=1)

    text = jax.lax.fori_loop(start, start + ANSWER, grow, text)
    return text[:, start:].reshape(rows, GROUP, ANSWER)


def until_end(answers):
    """Return which tokens belong to an answer: those up to its first end, which is included."""
    ends = (answers == MARK).astype(jnp.int32)
    return jnp.cumsum(ends, axis=-1) - ends == 0


def score(params, question, answers, real):
    """Return the log probability of each real token of the answers, b g a."""
    flat = answers.reshape(-1, ANSWER)
    text = jnp.concatenate([jnp.repeat(question, GROUP, axis=0), flat], axis=1)
    log_probs = -cross_entropy(logits_of(params, text[:, :-1], question.shape[1] - 1), flat)
    return jnp.where(real.reshape(flat.shape), log_probs, 0).reshape(answers.shape)


def advantages_of(rewards):
    """Return each reward less the mean of its group, over the group's standard deviation."""
    gaps = rewards - rewards[:, :1]  # exactly 0 where all are equal
    centred = gaps - gaps.mean(1, keepdims=True)
    variance = jnp.square(centred).sum(1, keepdims=True) / (GROUP - 1)
    return jnp.where(variance > 0, centred / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def group_loss(log_probs, advantages, real):
    """Return the mean over the answers of a group of the mean over their tokens."""
    old = jax.lax.stop_gradient(log_probs)  # of the model that sampled them: the same
    ratio = jnp.exp(jnp.where(real, log_probs, 0) - jnp.where(real, old, 0))
    bounded = jnp.clip(ratio, 1 - BELOW, 1 + ABOVE) * advantages[:, None]
    values = jnp.where(real, -jnp.minimum(ratio * advantages[:, None], bounded), 0)
    tokens = jnp.maximum(real.sum(-1), 1).astype(values.dtype)
    total, weight = sum_rows(values.sum(-1) / tokens, real.any(-1))
    return total / jnp.maximum(weight, 1)
