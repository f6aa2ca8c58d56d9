"""Answers that a language model samples in groups, and their log probabilities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Params
from jtrain.models.attention import soft_cap
from jtrain.models.generate import candidate_log_probs, generate_with_log_probs
from jtrain.models.transformer import LanguageModel


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
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "cache": True}
    return sample_with_log_probs(
        model, params, question, keys, group=group, tokens=tokens, **sampling
    )[0]


def sample_with_log_probs(
    model: LanguageModel,
    params: Params,
    question: Int[Array, "b q"],
    keys: Shaped[Array, "b"],
    *,
    group: int,
    tokens: int,
    cache: bool,
    **sampling: Any,
) -> tuple[Int[Array, "b g a"], Float[Array, "b g a"], Bool[Array, "b g a v"] | None]:
    """Return answers, the log probability by which each token was drawn, and its candidates.

    Args:
        cache: keep keys and values; without a cache the program of a token is the loss's.
        sampling: temperature, top_k and top_p; where the last two leave no token out, the
            candidates are None.
    """
    start, number = question.shape[1], jnp.arange(group)
    each = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, number)
    text, log_probs, candidates = generate_with_log_probs(
        model if cache else _UncachedModel(model, start, start + tokens),
        jax.lax.stop_gradient(params),
        jnp.repeat(question, group, axis=0),
        each.reshape(-1),
        steps=tokens,
        **sampling,
    )
    grouped = lambda x: x.reshape(len(question), group, *x.shape[1:])
    return (
        grouped(text[:, start:]),
        grouped(log_probs),
        None if candidates is None else grouped(candidates),
    )


@dataclasses.dataclass(frozen=True)
class _UncachedModel:
    """A model that reads the whole text again for each token, in the shapes of the loss."""

    model: LanguageModel
    start: int  # tokens of a question
    context: int  # of a question and its answer

    def empty(self, params: Params, rows: int) -> Int[Array, "b t"]:
        del params
        return jnp.zeros((rows, self.context - 1), jnp.int32)

    def extend(
        self, params: Params, cache: Int[Array, "b t"], tokens: Int[Array, "b n"], at: Any
    ) -> tuple[Float[Array, "b v"], Int[Array, "b t"]]:
        """Return the logits after `tokens`, and the text so far; after its last token any."""
        text = jax.lax.dynamic_update_slice_in_dim(cache, tokens, at, axis=1)
        logits = _answer_logits(self.model, params, text, self.start)
        last = at + tokens.shape[1] - self.start
        return jax.lax.dynamic_index_in_dim(logits, last, axis=1, keepdims=False), text


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
    candidates: Bool[Array, "b g a v"] | None = None,
    *,
    temperature: float = 1.0,
) -> Float[Array, "b g a"]:
    """Return the log probability of each real token of the answers, and 0 for the others.

    It is that of the distribution that is sampled: of the logits divided by `temperature`, over the
    `candidates` of each token; None: over all tokens.
    """
    rows, group, tokens = answers.shape
    flat = answers.reshape(rows * group, tokens)
    text = jnp.concatenate([jnp.repeat(question, group, axis=0), flat], axis=1)
    logits = _answer_logits(model, params, text[:, :-1], question.shape[1])
    if temperature != 1:
        logits = at_least_f32(logits) / temperature  # as the sampler divides them
    found = candidate_log_probs(logits.reshape(*answers.shape, -1), answers, candidates)
    return jnp.where(real, found, 0)


def _answer_logits(
    model: LanguageModel, params: Params, text: Int[Array, "b t"], start: int
) -> Float[Array, "b a v"]:
    """Return the logits of the tokens after the first `start`, of texts without their last."""
    hidden, _ = model.hidden(params, {}, text)
    logits = jnp.einsum("btd,vd->btv", hidden[:, start - 1 :], model.head(params))
    return soft_cap(logits, model.logit_cap)
