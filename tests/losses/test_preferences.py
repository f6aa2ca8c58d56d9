"""DPO, IPO, KTO, distillation, GRPO and its kin against plain numpy, and under every split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.losses.group_policy import group_advantages, grpo
from jtrain.losses.next_token import token_divergence
from jtrain.losses.preferences import dpo, ipo, kto, response_log_probs, token_log_probs
from jtrain.parallel import FSDP, Mirrored
from jtrain.testing import assert_invariant

DRAW = np.random.default_rng(0)
ROWS, TIME, VOCABULARY = 8, 6, 5
MASK = np.arange(ROWS) % 4 != 2
REAL = (np.arange(TIME) < np.array([6, 1, 3, 0, 2, 5, 4, 6])[:, None]) & MASK[:, None]
ROW_MASK, TOKENS = jnp.asarray(MASK), jnp.asarray(REAL)
normal = lambda *shape: DRAW.normal(size=shape).astype(np.float32)
CHOSEN, REJECTED, FIRST, SECOND = normal(4, ROWS)
DESIRABLE = np.arange(ROWS) % 2 == 0
OWN, OLD, REFERENCE = -np.abs(normal(3, ROWS, TIME))
ADVANTAGES = normal(ROWS)
sigmoid = lambda x: 1 / (1 + np.exp(-x))


def spoilt(x, mask):
    """Return an array with NaN where the mask is false."""
    return jnp.asarray(np.where(mask, x, np.nan), jnp.float32)


def margins():
    return np.float64((CHOSEN - FIRST) - (REJECTED - SECOND))[MASK]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        (functools.partial(dpo, beta=0.5), lambda m: -np.log(sigmoid(0.5 * m))),
        (
            functools.partial(dpo, beta=0.5, smoothing=0.1),
            lambda m: -0.9 * np.log(sigmoid(0.5 * m)) - 0.1 * np.log(sigmoid(-0.5 * m)),
        ),
        (functools.partial(ipo, beta=0.25), lambda m: (m - 2) ** 2),
    ],
)
def test_pairs_have_the_papers_loss(loss, plain):
    rows = [spoilt(x, MASK) for x in (CHOSEN, REJECTED, FIRST, SECOND)]
    value, metrics = jax.jit(loss)(*rows, ROW_MASK)
    assert_close(value.value(), plain(margins()).mean(), 1e-6)
    assert metrics["accuracy"].value() == (margins() > 0).mean()
    grad = jax.jit(jax.grad(lambda x: loss(x, *rows[1:], ROW_MASK)[0].total))(rows[0])
    slope = (plain(margins() + 1e-5) - plain(margins() - 1e-5)) / 2e-5
    assert_close(grad[MASK], slope, 1e-5)
    assert not np.asarray(grad)[~MASK].any()
    of_reference = jax.grad(lambda x: loss(*rows[:2], x, rows[3], ROW_MASK)[0].total)(rows[2])
    assert not np.asarray(of_reference).any()


def test_responses_have_the_value_of_kto():
    other = spoilt(FIRST + 0.5, MASK)  # so that the divergence is above 0
    rows = [spoilt(x, MASK) for x in (CHOSEN, FIRST)]
    call = functools.partial(kto, beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    value, metrics = jax.jit(call)(
        *rows, jnp.asarray(DESIRABLE), other, spoilt(np.minimum(FIRST, SECOND), MASK), ROW_MASK
    )
    ratio = np.float64(CHOSEN - FIRST)
    z = max(0, np.float64(FIRST + 0.5 - np.minimum(FIRST, SECOND))[MASK].mean())
    assert z > 0
    good, bad = 1.5 * (1 - sigmoid(0.5 * (ratio - z))), 0.7 * (1 - sigmoid(0.5 * (z - ratio)))
    assert_close(value.value(), np.where(DESIRABLE, good, bad)[MASK].mean(), 1e-6)
    assert_close(metrics["divergence"].value(), z, 1e-6)


def test_advantages_are_those_of_each_group():
    rewards, groups = np.float32([1, 0, 0, 1, 1, 5]), np.array([3, 3, 3, 8, 8, 3])
    got = group_advantages(rewards, groups)
    three = np.array([1, 0, 0, 5.0])
    want = (three - three.mean()) / three.std(ddof=1)
    assert_close(got[[0, 1, 2, 5]], want, 1e-6)
    assert not got[[3, 4]].any()
    plain = group_advantages(rewards, groups, by_deviation=False)
    assert_close(plain[[0, 1, 2, 5]], three - three.mean(), 1e-6)


@pytest.mark.thorough
def test_tokens_that_the_teacher_rules_out_count_nothing():
    teacher = np.float32([[[1.0, -np.inf, 0.5]]])
    logits, real = jnp.asarray([[[0.2, 0.3, -0.1]]]), jnp.ones((1, 1), bool)
    call = lambda x: token_divergence(x, jnp.asarray(teacher), real)[0].total  # of one token
    value, gradient = jax.jit(jax.value_and_grad(call))(logits)
    p, q = (
        np.exp(np.float64(z[0, 0])) / np.exp(np.float64(z[0, 0])).sum() for z in (teacher, logits)
    )
    assert_close(value, (p[[0, 2]] * np.log(p[[0, 2]] / q[[0, 2]])).sum(), 1e-6)
    assert_close(gradient[0, 0], q - p, 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("reverse", "top_k"), [(False, 0), (True, 3)])
def test_divergence_is_that_of_the_distributions(reverse, top_k):
    student, teacher = normal(2, ROWS, TIME, VOCABULARY)
    hidden = REAL[..., None]
    call = functools.partial(token_divergence, reverse=reverse, top_k=top_k, temperature=2.0)
    value, metrics = jax.jit(call)(spoilt(student, hidden), spoilt(teacher, hidden), TOKENS)
    want, agree = [], []
    for b, t in zip(*np.nonzero(REAL), strict=True):
        at = np.argsort(-teacher[b, t])[: top_k or VOCABULARY]
        p, q = (np.exp(np.float64(z[b, t, at]) / 2) for z in (teacher, student))
        p, q = p / p.sum(), q / q.sum()
        p, q = (q, p) if reverse else (p, q)
        want.append(4 * (p * np.log(p / q)).sum())
        agree.append(student[b, t].argmax() == teacher[b, t].argmax())
    assert_close(value.value(), np.mean(want), 1e-6)
    assert_close(metrics["agreement"].value(), np.mean(agree), 1e-6)


def test_log_probs_are_summed_over_real_tokens_alone():
    logits, targets = normal(ROWS, TIME, VOCABULARY), DRAW.integers(0, VOCABULARY, (ROWS, TIME))
    got = jax.jit(response_log_probs)(jnp.asarray(logits), jnp.asarray(targets, jnp.int32), TOKENS)
    wide = np.float64(logits)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    assert_close(got, np.where(REAL, chosen, 0).sum(-1), 1e-6)


def logits_of(params, batch):
    return params["embed"][batch["tokens"]] @ params["head"]


def chat_pairs(params, batch, rng):
    del rng
    chosen = response_log_probs(logits_of(params, batch), batch["targets"], batch["real"])
    return dpo(chosen, -0.5 * chosen, batch["first"], batch["second"], batch["mask"])


def policy(params, batch, rng):
    del rng
    real = batch["real"] & batch["mask"][:, None]
    own = token_log_probs(logits_of(params, batch), batch["targets"], real)
    return grpo(own, batch["old"], batch["advantage"], real)


def student(params, batch, rng):
    del rng
    real = batch["real"] & batch["mask"][:, None]
    return token_divergence(logits_of(params, batch), batch["teacher"], real, reverse=True)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [chat_pairs, student, policy])
def test_every_split_gives_one_step(loss):
    """Some microbatches have no token at all."""
    real = np.arange(TIME) < np.array([6, 1, 0, 0, 2, 5, 4, 6])[:, None]
    batch = {
        "tokens": DRAW.integers(0, VOCABULARY, (ROWS, TIME)).astype(np.int32),
        "targets": DRAW.integers(0, VOCABULARY, (ROWS, TIME)).astype(np.int32),
        "real": real,
        "first": CHOSEN - 8,
        "second": REJECTED,
        "old": OLD,
        "advantage": ADVANTAGES,
        "teacher": normal(ROWS, TIME, VOCABULARY),
    }
    params = {"embed": normal(VOCABULARY, 4), "head": normal(4, VOCABULARY)}
    where = {
        "parts": FSDP(devices=4, min_size=0),
        "replicas": Mirrored(devices=2, impl="shard_map"),
    }
    assert_invariant(loss, params, batch, strategies=where)
