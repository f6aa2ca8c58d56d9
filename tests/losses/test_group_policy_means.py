"""GRPO's weighting over microbatches, and what a mean of the microbatches' own means would give.

TRL's `loss_type="bnpo"` divides by the tokens of each device's microbatch, as its documentation
says; nanochat's scripts/chat_rl.py (2026) divides each pass over some answers by the tokens of
that pass, and by the number of passes.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance

import jtrain as jt
from jtrain.losses.group_policy import dapo, group_advantages
from jtrain.losses.preferences import token_log_probs

PAGE = Path(__file__).parents[2] / "docs" / "grpo.md"
QUESTIONS, GROUP, TIME, VOCABULARY = 4, 8, 24, 7
ROWS = QUESTIONS * GROUP
SPLITS = (1, 2, 4, 8, 16)


@functools.cache
def batch():
    """Return answers whose lengths go from 1 to 24, as right and wrong ones differ."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(1 + draw.geometric(0.12, ROWS), TIME)
    rewards = (draw.random(ROWS) < 0.4).astype(np.float32)
    return {
        "tokens": draw.integers(0, VOCABULARY, (ROWS, TIME)).astype(np.int32),
        "targets": draw.integers(0, VOCABULARY, (ROWS, TIME)).astype(np.int32),
        "real": np.arange(TIME) < lengths[:, None],
        "advantage": group_advantages(rewards, np.repeat(np.arange(QUESTIONS), GROUP)),
    }


@functools.cache
def params():
    draw = np.random.default_rng(1)
    return {"embed": draw.normal(size=(VOCABULARY, 4)), "head": draw.normal(size=(4, VOCABULARY))}


def loss(params, rows, rng):
    del rng
    real = rows["real"] & rows.get("mask", jnp.ones(len(rows["real"]), bool))[:, None]
    logits = params["embed"][rows["tokens"]] @ params["head"]
    own = token_log_probs(logits, rows["targets"], real)
    return dapo(own, jax.lax.stop_gradient(own), rows["advantage"], real)[0]


@functools.cache
def mean_of_means(parts: int):
    """Return the loss and the gradient as the mean over parts of the mean over their tokens."""

    def total(params, rows):
        mean = loss(params, rows, None)
        return mean.total / jnp.maximum(mean.weight, 1)

    call = jax.jit(jax.value_and_grad(total))
    rows = [
        {name: jnp.asarray(np.split(x, parts)[i]) for name, x in batch().items()}
        for i in range(parts)
    ]
    found = [call(jax.tree.map(jnp.float32, params()), each) for each in rows]
    return jax.tree.map(lambda *leaves: sum(leaves) / parts, *found)


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [2, 8])
def test_microbatches_have_the_loss_and_gradient_of_the_whole_batch(microbatches):
    import optax

    start = jax.tree.map(jnp.float32, params())
    state = jt.new_state(start, optax.sgd(1.0), jax.random.key(0))
    step = jax.jit(jt.make_step(loss, optax.sgd(1.0), microbatches=microbatches))
    after, metrics = step(state, {name: jnp.asarray(x) for name, x in batch().items()})
    want, gradient = mean_of_means(1)
    assert_close(metrics["loss"].value(), want, 1e-6, terms=1.0)
    assert distance(jax.tree.map(lambda a, b: a - b, start, after.params), gradient) < 1e-5


@functools.cache
def table() -> str:
    """Return the rows of docs/grpo.md."""
    want, gradient = mean_of_means(1)
    lines = []
    for parts in SPLITS:
        value, found = mean_of_means(parts)
        apart = distance(found, gradient) if parts > 1 else 0
        off = f"{value:+.3f} ({value - want:+.3f})"
        lines.append(f"| {parts} | {ROWS // parts} | {off} | {100 * apart:.0f} % |")
    return "\n".join(lines)


@pytest.mark.thorough
def test_means_of_means_are_of_another_loss_as_the_page_says():
    for parts in SPLITS[1:]:
        assert distance(mean_of_means(parts)[1], mean_of_means(1)[1]) > 0.05
    assert table() in PAGE.read_text(), table()
