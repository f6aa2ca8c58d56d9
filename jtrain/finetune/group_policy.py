"""Group policy optimization of a language model: its config, and the loss that samples.

A row of a batch is a question, and with it the group of all answers to it. So no split of a batch
cuts a group, and a step is a pure function of its state and its batch: a resumed or replayed step
samples the same answers.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.loss import Stateful
from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.finetune.rollouts import (
    Verifier,
    answer_log_probs,
    init_rollouts,
    sample_answers,
    until_end,
)
from jtrain.losses.group_policy import advantages_by_row, dapo, dr_grpo, grpo, gspo
from jtrain.models.language_model import LanguageModel


@configclass
class GroupPolicy:
    """GRPO or one of its kin."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    """Weights of tokens and answers; see `jtrain.losses.group_policy`. Tokens of DAPO are those of
    a group, as in its paper."""
    group: int = Field(default=8, ge=1)
    """Answers to a question, at least 2; their mean reward is the baseline."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits, in sampling and in the loss."""
    updates: int = Field(default=1, ge=1)
    """Steps that learn from the same answers; the questions of the later ones are left out."""
    clip: tuple[float, float] | None = None
    """How far below and above 1 a ratio of probabilities counts; null: as the paper of `loss`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the parameters before the first step; 0: it is not computed."""

    def misfits(self, name: str = "policy") -> Iterator[tuple[str, str]]:
        """Yield the values that conflict, under the name of this field."""
        if self.group < 2:
            yield (
                f"{name}.group",
                "is 1, and an answer alone in its group is its own baseline, so that its "
                f"advantage is always 0; set {name}.group=8, or at least 2",
            )
        if self.loss == "gspo" and self.beta:
            yield (
                f"{name}.beta",
                f"pulls towards a reference, which gspo has no term for; set {name}.beta=0, or "
                f"{name}.loss=grpo",
            )


def init_policy(
    init: Callable[[Key], tuple[Params, Extra]],
    settings: GroupPolicy,
    *,
    rows: int,
    question: int,
    answer: int,
) -> Callable[[Key], tuple[Params, Extra]]:
    """Return `init` of a model with what the loss carries: steps, rollouts and the reference.

    Args:
        rows: in the whole batch.
        question: tokens of a question.
        answer: most tokens of an answer.
    """

    def carried(key: Key) -> tuple[Params, Extra]:
        params, _ = init(key)
        extra = {
            "steps": jnp.int32(0),
            "rollouts": init_rollouts(rows, settings.group, question, answer),
        }
        if settings.beta:  # a copy, set by the first step: by then stored weights are loaded
            extra["reference"] = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return params, extra

    return carried


def policy_loss(model: LanguageModel, verify: Verifier, settings: GroupPolicy, end: int) -> Stateful:
    """Return the loss that samples answers to `question` (b q), and learns from their rewards.

    An evaluation answers with the likeliest tokens: its loss is the share of the reward that is
    missing, its metric `accuracy` the reward.

    Args:
        verify: the reward of each answer, at most 1.
        end: the token that ends an answer.
    """
    score = functools.partial(answer_log_probs, model, temperature=settings.temperature)

    def loss(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Mean, Metrics, Extra]:
        if rng is None:
            return *_evaluate(model, verify, params, extra, batch), extra
        fresh = extra["steps"] % settings.updates == 0
        rollouts = _rollouts(model, verify, settings, params, extra, batch, rng)
        question, answers = rollouts["question"], rollouts["answers"]
        real = until_end(answers, end) & batch["mask"][:, None, None]
        own = score(params, question, answers, real)
        old = jnp.where(fresh, jax.lax.stop_gradient(own), rollouts["log_probs"])
        rollouts = {**rollouts, "log_probs": old}
        more, reference = {}, None
        if settings.beta:
            reference = _reference(params, extra)
            more["reference"] = score(reference, question, answers, real)
        value, metrics = _by_group(settings, own, rollouts, real, batch, **more)
        return value, metrics, _record(extra, rollouts, reference, batch)

    return Stateful(loss)


def _evaluate(
    model: LanguageModel, verify: Verifier, params: Params, extra: Extra, batch: Batch
) -> tuple[Mean, Metrics]:
    tokens = extra["rollouts"]["answers"].shape[-1]
    keys = row_keys(jax.random.key(0), batch)
    how = {"group": 1, "tokens": tokens, "temperature": 0.0}
    rewards = verify(sample_answers(model, params, batch["question"], keys, **how), batch)[:, 0]
    mask = batch["mask"]
    return Mean.of(1 - rewards, mask), {"accuracy": Mean.of(rewards, mask)}


def _rollouts(
    model: LanguageModel,
    verify: Verifier,
    settings: GroupPolicy,
    params: Params,
    extra: Extra,
    batch: Batch,
    rng: Key,
) -> Extra:
    """Return the rollouts of these rows: sampled now, or those that an earlier step recorded."""
    recorded = jax.tree.map(lambda x: x[batch["row"]], extra["rollouts"])

    def sample() -> Extra:
        answers = sample_answers(
            model,
            params,
            batch["question"],
            row_keys(rng, batch),
            group=settings.group,
            tokens=recorded["answers"].shape[-1],
            temperature=settings.temperature,
        )
        rewards = verify(answers, batch)
        return {**recorded, "question": batch["question"], "answers": answers, "rewards": rewards}

    if settings.updates == 1:
        return sample()
    return jax.lax.cond(extra["steps"] % settings.updates == 0, sample, lambda: recorded)


def _reference(params: Params, extra: Extra) -> Params:
    """Return the parameters before the first step, in the type that the loss computes in."""
    first = extra["steps"] == 0
    keep = lambda now, then: jnp.where(first, jax.lax.stop_gradient(now), then.astype(now.dtype))
    return jax.tree.map(keep, params, extra["reference"])


def _by_group(
    settings: GroupPolicy,
    own: Float[Array, "b g a"],
    rollouts: Extra,
    real: Array,
    batch: Batch,
    **reference: Float[Array, "b g a"],
) -> tuple[Mean, Metrics]:
    """Return the mean over groups of the loss of each, so that its weight depends on no sample."""
    mask, rewards = batch["mask"], rollouts["rewards"]
    loss = _loss(settings, own.shape[-1])
    advantages = advantages_by_row(rewards, by_deviation=settings.loss != "dr_grpo")
    given = own, rollouts["log_probs"], advantages, real
    means, metrics = jax.vmap(lambda given, named: loss(*given, **named))(given, reference)
    values = means.total / jnp.maximum(means.weight, 1)
    counted = {name: _sum(mean, mask) for name, mean in metrics.items()}
    counted["reward"] = Mean.of(rewards.mean(1), mask)
    counted["mixed"] = Mean.of((advantages != 0).any(1).astype(jnp.float32), mask)
    counted["length"] = Mean.of(real.sum(-1).astype(jnp.float32).mean(1), mask)
    return Mean.of(values, mask), counted


def _sum(mean: Mean, mask: Array) -> Mean:
    """Return the mean over the groups of a metric of each, by their weights."""
    return Mean(jnp.where(mask, mean.total, 0).sum(), jnp.where(mask, mean.weight, 0).sum())


def _loss(settings: GroupPolicy, tokens: int) -> Callable[..., tuple[Mean, Metrics]]:
    losses: dict[str, Callable[..., Any]] = {"grpo": grpo, "dapo": dapo, "gspo": gspo}
    losses["dr_grpo"] = functools.partial(dr_grpo, tokens=tokens)
    how: dict[str, Any] = {"clip": settings.clip} if settings.clip else {}
    how |= {"beta": settings.beta} if settings.beta else {}
    return functools.partial(losses[settings.loss], **how)


def _record(extra: Extra, rollouts: Extra, reference: Params | None, batch: Batch) -> Extra:
    """Return what is carried, each leaf as sums: a row's by its place, others by the first row."""
    row, mask = batch["row"], batch["mask"]
    first = (mask & (row == 0)).any().astype(jnp.float32)

    def place(new: Array, old: Array) -> Mean:
        shown = mask.reshape(-1, *[1] * (new.ndim - 1))
        wide = jnp.where(shown, new, 0).astype(jnp.float32)
        ones = jnp.broadcast_to(shown, new.shape).astype(jnp.float32)
        zeros = jnp.zeros(old.shape, jnp.float32)
        return Mean(zeros.at[row].add(wide), zeros.at[row].add(ones))

    after = {
        "steps": Mean(first * (extra["steps"] + 1).astype(jnp.float32), first),
        "rollouts": jax.tree.map(place, rollouts, extra["rollouts"]),
    }
    if reference is not None:
        once = first * (extra["steps"] == 0).astype(jnp.float32)
        keep = lambda x: Mean(once * x.astype(jnp.float32), once)
        after["reference"] = jax.tree.map(keep, reference)
    return after
