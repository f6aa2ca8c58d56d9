"""Group policy optimization of a language model: its config, and the loss that samples.

A row of a batch is a question, and with it the group of all answers to it. So no split of a batch
cuts a group, and a step is a pure function of its state and its batch: a resumed or replayed step
samples the same answers.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.loss import Stateful
from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.data.text.tokenizers import Tokenizer, decode_known
from jtrain.errors import ConfigError, LossError
from jtrain.finetune.answers import (
    answer_log_probs,
    sample_answers,
    sample_with_log_probs,
    until_end,
)
from jtrain.finetune.reference import copy_reference, reference_loss
from jtrain.losses.group_policy import advantages_by_row, dapo, dr_grpo, grpo, gspo
from jtrain.models.transformer import LanguageModel

Below = Annotated[float, Field(gt=0, lt=1)]
Above = Annotated[float, Field(gt=0)]
RewardFn: TypeAlias = Callable[[Int[Array, "b g a"], Batch], Float[Array, "b g"]]
"""Reward of each answer to the question of its row: a plain function."""


@configclass
class GroupPolicy:
    """GRPO or one of its variants."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    """Weights of tokens and answers; see `jtrain.losses.group_policy`. Tokens of DAPO are those of
    a group, as in its paper."""
    group: int = Field(default=8, ge=2)
    """Answers to a question, at least 2; their mean reward is the baseline."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits, in sampling and in the loss."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to draw from, in sampling and in the loss; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the likeliest tokens to draw from, in both too; 1: all."""
    cache: bool = True
    """Cache keys and values while sampling. Without a cache the whole text is read again for each
    token, as the loss reads it: slow, and the sampler's probabilities are the loss's."""
    updates: int = Field(default=1, ge=1)
    """Steps that learn from the same answers; the questions of the later ones are left out."""
    clip: tuple[Below, Above] | None = None
    """How far below and above 1 a ratio of probabilities counts; null: as the paper of `loss`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the parameters before the first step; 0: it is not computed."""

    def problems(self, name: str = "policy") -> Iterator[tuple[str, str]]:
        """Yield the values that conflict, under the name of this field."""
        if self.loss == "gspo" and self.beta:
            yield (
                f"{name}.beta",
                f"pulls towards a reference, which gspo has no term for; set {name}.beta=0, or "
                f"{name}.loss=grpo",
            )
        if self.updates > 1 and (self.top_k or self.top_p < 1):
            yield (
                f"{name}.updates",
                f"is {self.updates}, and the candidates of {name}.top_k and {name}.top_p are not "
                f"kept for a later step; set {name}.updates=1, or leave both out",
            )


def init_policy(
    settings: GroupPolicy, *, question: int, answer: int
) -> Callable[[Params, Extra, int], Extra]:
    """Return the `init_extra` of an experiment: steps, rollouts and the reference.

    Args:
        question: tokens of a question.
        answer: most tokens of an answer.
    """

    def init_extra(params: Params, extra: Extra, rows: int) -> Extra:
        del extra
        rollouts = init_rollouts(rows, settings.group, question, answer)
        reference = copy_reference(params) if settings.beta else {}
        return {"steps": jnp.int32(0), "rollouts": rollouts, **reference}

    return init_extra


def policy_loss(
    model: LanguageModel, reward: RewardFn, settings: GroupPolicy, end: int
) -> Stateful:
    """Return the loss that samples answers to `question` (b q), and learns from their rewards.

    An evaluation answers with the likeliest tokens: its loss is the share of the reward that is
    missing, its metric `accuracy` the reward.

    Args:
        reward: the reward of each answer, at most 1.
        end: the token that ends an answer.

    Raises:
        ConfigError: if two settings conflict.
    """
    for name, words in settings.problems("GroupPolicy"):
        raise ConfigError(f"{name} {words}.")
    score = functools.partial(answer_log_probs, model, temperature=settings.temperature)

    def compare(
        params: Params, reference: Params | None, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Mean, Metrics, Extra]:
        if rng is None:
            return *_evaluate(model, reward, params, extra, batch), extra
        _check_rows(batch, extra)
        fresh = extra["steps"] % settings.updates == 0
        rollouts, candidates = _rollouts(model, reward, settings, params, extra, batch, rng)
        question, answers = rollouts["question"], rollouts["answers"]
        real = until_end(answers, end) & batch["mask"][:, None, None]
        own = score(params, question, answers, real, candidates)
        old = jnp.where(fresh, jax.lax.stop_gradient(own), rollouts["log_probs"])
        sampler = jnp.where(real, rollouts["sampler_log_probs"], 0)
        rollouts = {**rollouts, "log_probs": old, "sampler_log_probs": sampler}
        log_probs = {"log_probs": own, "old": old}
        if reference is not None:
            log_probs["reference"] = score(reference, question, answers, real, candidates)
        value, metrics = _by_group(settings, log_probs, rollouts["rewards"], real, batch)
        return value, metrics, _record(extra, rollouts, batch)

    if settings.beta:
        return reference_loss(compare)
    return Stateful(lambda params, extra, batch, rng: compare(params, None, extra, batch, rng))


def _check_rows(batch: Batch, extra: Extra) -> None:
    rows, recorded = len(batch["mask"]), len(extra["rollouts"]["answers"])
    if rows > recorded:
        raise LossError(
            f"a batch has {rows} questions, and the state has room for the rollouts of {recorded}. "
            f"Make it for the rows of a whole batch: init_policy(...)(params, extra, {rows}). An "
            f"Experiment with `init_extra=init_policy(...)` does."
        )


def _evaluate(
    model: LanguageModel, reward: RewardFn, params: Params, extra: Extra, batch: Batch
) -> tuple[Mean, Metrics]:
    tokens = extra["rollouts"]["answers"].shape[-1]
    keys = row_keys(jax.random.key(0), batch)
    how = {"group": 1, "tokens": tokens, "temperature": 0.0}
    rewards = reward(sample_answers(model, params, batch["question"], keys, **how), batch)[:, 0]
    mask = batch["mask"]
    return Mean.of(1 - rewards, mask), {"accuracy": Mean.of(rewards, mask)}


def _rollouts(
    model: LanguageModel,
    reward: RewardFn,
    settings: GroupPolicy,
    params: Params,
    extra: Extra,
    batch: Batch,
    rng: Key,
) -> tuple[Extra, Bool[Array, "b g a v"] | None]:
    """Return the rollouts of these rows, sampled now or recorded by an earlier step.

    With them come the candidates of each token; None: all tokens.
    """
    recorded = jax.tree.map(lambda x: x[batch["row"]], extra["rollouts"])

    def sample() -> tuple[Extra, Bool[Array, "b g a v"] | None]:
        answers, sampler_log_probs, candidates = sample_with_log_probs(
            model,
            params,
            batch["question"],
            row_keys(rng, batch),
            group=settings.group,
            tokens=recorded["answers"].shape[-1],
            cache=settings.cache,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        new = {
            "question": batch["question"],
            "answers": answers,
            "rewards": reward(answers, batch),
            "sampler_log_probs": sampler_log_probs,
        }
        return {**recorded, **new}, candidates

    if settings.updates == 1:
        return sample()
    fresh = extra["steps"] % settings.updates == 0
    return jax.lax.cond(fresh, lambda: sample()[0], lambda: recorded), None


def _by_group(
    settings: GroupPolicy,
    log_probs: Mapping[str, Float[Array, "b g a"]],
    rewards: Float[Array, "b g"],
    real: Bool[Array, "b g a"],
    batch: Batch,
) -> tuple[Mean, Metrics]:
    """Return the mean over groups of the loss of each, so that its weight depends on no sample."""
    mask, loss = batch["mask"], _loss(settings, real.shape[-1])
    advantages = advantages_by_row(rewards, by_deviation=settings.loss != "dr_grpo")
    by_answer = {**log_probs, "advantages": advantages, "real": real}
    means, metrics = jax.vmap(lambda group: loss(**group))(by_answer)
    values = means.total / jnp.maximum(means.weight, 1)
    totals = {name: _sum(mean, mask) for name, mean in metrics.items()}
    totals["reward"] = Mean.of(rewards.mean(1), mask)
    totals["mixed"] = Mean.of((advantages != 0).any(1).astype(jnp.float32), mask)
    totals["length"] = Mean.of(real.sum(-1).astype(jnp.float32).mean(1), mask)
    return Mean.of(values, mask), totals


def _sum(mean: Mean, mask: Array) -> Mean:
    """Return the mean over the groups of a metric of each, by their weights."""
    return Mean(jnp.where(mask, mean.total, 0).sum(), jnp.where(mask, mean.weight, 0).sum())


def _loss(settings: GroupPolicy, tokens: int) -> Callable[..., tuple[Mean, Metrics]]:
    losses: dict[str, Callable[..., Any]] = {"grpo": grpo, "dapo": dapo, "gspo": gspo}
    losses["dr_grpo"] = functools.partial(dr_grpo, tokens=tokens)
    how: dict[str, Any] = {"clip": settings.clip} if settings.clip else {}
    how |= {"beta": settings.beta} if settings.beta else {}
    return functools.partial(losses[settings.loss], **how)


def _record(extra: Extra, rollouts: Extra, batch: Batch) -> Extra:
    """Return the next `extra`: each row's rollouts at its place, the steps of the first row."""
    row, mask = batch["row"], batch["mask"]
    first = (mask & (row == 0)).any().astype(jnp.float32)

    def place(new: Array, old: Array) -> Mean:
        by_row = mask.reshape(-1, *[1] * (new.ndim - 1))
        values = jnp.where(by_row, new, 0).astype(jnp.float32)
        ones = jnp.broadcast_to(by_row, new.shape).astype(jnp.float32)
        zeros = jnp.zeros(old.shape, jnp.float32)
        return Mean(zeros.at[row].add(values), zeros.at[row].add(ones))

    return {
        **extra,
        "steps": Mean(first * (extra["steps"] + 1).astype(jnp.float32), first),
        "rollouts": jax.tree.map(place, rollouts, extra["rollouts"]),
    }


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
        "sampler_log_probs": jnp.zeros((rows, group, answer), jnp.float32),
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
