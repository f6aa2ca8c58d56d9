"""The loss that samples: its values against plain numpy, and one result under every split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.core.placement import Placement, Unplaced
from jtrain.finetune.group_policy import GroupPolicy, init_policy, policy_loss
from jtrain.models.transformer import Transformer
from jtrain.parallel import FSDP, Mirrored
from jtrain.testing import assert_invariant, place_loss

pytestmark = pytest.mark.thorough

ROWS, GROUP, START, TOKENS, VOCAB, END = 8, 4, 3, 4, 6, 5
KINDS = ["grpo", "dr_grpo", "dapo", "gspo"]
NETWORK = Transformer(vocab=VOCAB, context=START + TOKENS, layers=1, heads=2, width=16)
BATCH = {
    "question": np.random.default_rng(0).integers(0, VOCAB, (ROWS, START)).astype(np.int32),
    "row": np.arange(ROWS, dtype=np.int32),
    "mask": np.arange(ROWS) != 2,
}


def verify(answers, batch):
    """Reward answers that have the first token of the question; more so at their beginning."""
    hits = answers == batch["question"][:, None, :1]
    return hits[..., 0] * 0.5 + hits.any(-1) * 0.5


def settings_of(kind, updates=2):
    beta = 0.0 if kind == "gspo" else 0.3
    return GroupPolicy(loss=kind, group=GROUP, updates=updates, beta=beta, temperature=0.8)


def loss_of(kind, updates=2, place: Placement = Unplaced()):
    return policy_loss(NETWORK.build(place), verify, settings_of(kind, updates), END)


@functools.cache
def states(kind):
    """Return the states before the first and the second step, and the metrics of the second."""
    sgd = optax.sgd(0.1)
    params, _ = jax.jit(NETWORK.build().init)(jax.random.key(0))
    params = jax.tree.map(lambda x: 3 * x, params)  # as stored weights differ from what init makes
    extra = init_policy(settings_of(kind), question=START, answer=TOKENS)(params, {}, ROWS)
    first = jt.new_state(params, sgd, jax.random.key(1), extra)
    step = jax.jit(jt.make_step(loss_of(kind), sgd, ragged=True))
    second, _ = step(first, BATCH)
    return first, second, step(second, BATCH)


@functools.cache
def scores():
    model = NETWORK.build()
    return jax.jit(lambda params, texts: model.apply(params, {}, texts)[0])


def log_probs(params, text):
    logits = np.float64(scores()(params, jnp.asarray(text[None]))[0]) / 0.8
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [log_p[t - 1, text[t]] for t in range(START, len(text))]


def plain_loss(kind):
    """Return the loss of the second step, answer by answer and token by token."""
    first, second, _ = states(kind)
    rollouts, groups = jax.device_get(second.extra["rollouts"]), []
    below, above = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(kind, (0.2, 0.2))
    for row in np.flatnonzero(BATCH["mask"]):
        answers, every_token = [], []
        rewards = np.float64(rollouts["rewards"][row])
        advantages = rewards - rewards.mean()
        if kind != "dr_grpo" and rewards.std():
            advantages /= rewards.std(ddof=1)
        for answer, a in zip(rollouts["answers"][row], advantages, strict=True):
            count = list(answer).index(END) + 1 if END in answer else TOKENS
            text = np.concatenate([BATCH["question"][row], answer])
            own, old, reference = (
                np.array(log_probs(s.params, text)[:count]) for s in (second, first, first)
            )
            ratio = np.exp(own - old)
            ratio = np.exp((own - old).mean()) if kind == "gspo" else ratio
            values = -np.minimum(ratio * a, np.clip(ratio, 1 - below, 1 + above) * a)
            if kind != "gspo":
                values = values + 0.3 * (np.exp(reference - own) - (reference - own) - 1)
            answers.append(values.sum() / TOKENS if kind == "dr_grpo" else values.mean())
            every_token += np.atleast_1d(values).tolist()
        groups.append(np.mean(every_token if kind == "dapo" else answers))
    return np.mean(groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_update_has_the_papers_loss_for_the_answers_of_the_first(kind):
    first, second, (third, metrics) = states(kind)
    want = plain_loss(kind)
    assert abs(want) > 1e-3
    assert_close(metrics["loss"].value(), want, 1e-5, terms=1.0)  # ratios and rewards are near 1
    assert 0 < metrics["clipped"].value() < 1
    assert 0 < metrics["mixed"].value() <= 1
    now, then = (jax.device_get(s.extra["rollouts"]) for s in (third, second))
    for name, leaf in then.items():
        np.testing.assert_array_equal(now[name], leaf, err_msg=f"{name} of the same rollouts")
    assert third.extra["steps"] == 2
    if kind != "gspo":
        for x, y in zip(
            *map(jax.tree.leaves, (first.params, third.extra["reference"])), strict=True
        ):
            np.testing.assert_array_equal(x, y, err_msg="the reference stays, bit for bit")


def test_an_evaluation_answers_with_the_likeliest_tokens():
    first, _, _ = states("dapo")
    value, metrics, extra = jax.jit(
        lambda params, extra: loss_of("dapo").loss(
            params, extra, jax.tree.map(jnp.asarray, BATCH), None
        )
    )(first.params, first.extra)
    rewards = []
    for row in np.flatnonzero(BATCH["mask"]):
        text = BATCH["question"][row]
        for _ in range(TOKENS):
            padded = np.concatenate([text, np.zeros(START + TOKENS - len(text), np.int32)])
            logits = scores()(first.params, jnp.asarray(padded[None]))[0, len(text) - 1]
            text = np.append(text, np.int32(logits.argmax()))
        answer = jnp.asarray(text[START:])[None, None]
        rewards.append(float(verify(answer, {"question": BATCH["question"][row][None]})[0, 0]))
    assert_close(metrics["accuracy"].value(), np.mean(rewards), 1e-6, terms=1.0)
    assert_close(value.value(), 1 - np.mean(rewards), 1e-6, terms=1.0)
    assert jax.tree.structure(extra) == jax.tree.structure(first.extra)


@pytest.mark.parametrize(("kind", "steps"), [("dr_grpo", 2), ("dapo", 1)])
def test_every_split_gives_one_step(kind, steps):
    """Microbatches and devices have some of the groups; none has a part of one.

    The step after two samples, and differs from the reference. GRPO's loss is 0 there: every ratio
    is 1, and the advantages of a group sum to 0.
    """
    first, second, (third, _) = states(kind)
    state = (first, second, third)[steps]
    report = assert_invariant(
        place_loss(lambda place: loss_of(kind, place=place)),
        jax.device_get(state.params),
        BATCH | {"mask": np.ones(ROWS, bool)},
        extra=jax.device_get(state.extra),
        strategies={
            "parts": FSDP(devices=4, min_size=0),
            "replicas": Mirrored(devices=2, impl="shard_map"),
        },
    )
    assert {"2 microbatches", "4 microbatches", "parts"} <= {row.check for row in report.rows}
