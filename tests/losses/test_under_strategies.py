"""The shelf in one step: losses and metrics are one device's under every strategy.

Classes distilled from a teacher in `extra`, an autoencoder whose rows draw, a language model with
chunked cross entropy: each with rows that a mask hides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import keep_gradient, strategy

from jtrain.core.loss import stateful
from jtrain.core.rows import row_keys
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.accuracy import accuracy, calibration, confusion, expected_calibration_error
from jtrain.losses.balance import z_loss
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.cross_entropy import binary_cross_entropy, distillation
from jtrain.losses.elbo import elbo, latents
from jtrain.losses.next_token import inputs_and_targets
from jtrain.losses.squared_error import huber

ROWS, WIDTH, CLASSES, TIME, VOCABULARY = 32, 6, 5, 7, 24
OPTIMIZER = optax.chain(keep_gradient(), optax.sgd(0.1))


def batch():
    draw = np.random.default_rng(0)
    normal = draw.standard_normal
    return {
        "x": normal((ROWS, WIDTH)).astype(np.float32),
        "label": draw.integers(0, CLASSES, ROWS).astype(np.int32),
        "tokens": draw.integers(0, VOCABULARY, (ROWS, TIME + 1)).astype(np.int32),
        "length": draw.integers(0, TIME + 1, ROWS).astype(np.int32),
        "row": np.arange(ROWS, dtype=np.int32),
        "mask": draw.random(ROWS) < 0.7,
    }


def init():
    draw = np.random.default_rng(1)
    kernel = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    params = {
        "classes": kernel(WIDTH, CLASSES),
        "encode": kernel(WIDTH, 4),
        "decode": kernel(2, WIDTH),
        "embed": kernel(VOCABULARY, WIDTH),
        "head": kernel(VOCABULARY, WIDTH),
    }
    return new_state(params, OPTIMIZER, jax.random.key(2), {"teacher": kernel(WIDTH, CLASSES)})


@stateful
def loss(params, extra, batch, rng):
    x, mask, label = batch["x"], batch["mask"], batch["label"]
    logits = x @ params["classes"]
    student, metrics = distillation(logits, x @ extra["teacher"], mask, temperature=2.0)
    mean, log_variance = jnp.split(x @ params["encode"], 2, -1)
    again = latents(row_keys(rng, batch), mean, log_variance) @ params["decode"]
    bound, parts = elbo(jnp.square(again - x).sum(-1) / 2, mean, log_variance, mask, beta=0.5)
    inputs, targets, real = inputs_and_targets(batch)
    hidden = params["embed"][inputs]
    language, tokens = chunked_next_token(
        hidden, params["head"], targets, real, chunk=3, soft_cap=20.0, z_loss=0.01
    )
    metrics |= parts | {f"token_{name}": value for name, value in tokens.items()}
    metrics |= calibration(logits, label, mask, bins=4)
    metrics |= {
        "top": accuracy(logits, label, mask, top=2),
        "confusion": confusion(logits, label, mask),
    }
    more = huber(again, x, mask)[0] + binary_cross_entropy(logits, logits > 1, mask)[0]
    return student + bound + language + 0.3 * more + 0.01 * z_loss(logits, mask), metrics, extra


@functools.cache
def one_step(name, devices, microbatches):
    """Return the state after a step and its metrics, on the host."""
    where = strategy(name, devices)
    step = make_step(loss, OPTIMIZER, microbatches=microbatches, psum=where.psum, ragged=True)
    state = jax.jit(init, out_shardings=where.shardings(jax.eval_shape(init)))()
    placed = where.place(batch())
    state, metrics = where.compile(step, state, placed, keeps=True)(state, placed)
    return jax.device_get((state.opt_state[0], state.extra)), metrics


@pytest.mark.slow  # 10 s; in tests/every each loss is split and added up
@pytest.mark.parametrize(
    ("name", "devices", "microbatches"),
    [
        ("fsdp", 4, 2),
        ("mirrored shard_map", 4, 1),
        ("single", 1, 4),
        ("mirrored jit", 8, 4),
        ("mirrored pmap", 4, 2),
        ("fsdp", 8, 1),
    ],
)
def test_one_result(name, devices, microbatches):
    (grads, extra), metrics = one_step(name, devices, microbatches)
    (want, before), wanted = one_step("single", 1, 1)
    assert distance(grads, want) <= 1e-6
    np.testing.assert_array_equal(extra["teacher"], before["teacher"])
    for metric, exact in wanted.items():
        if exact.weight is not None and metric not in {"grad_norm", "update_norm"}:
            got = metrics[metric]  # a bin may have no row, and then no mean
            assert_close(got.total, exact.total, 2e-6, says=metric)
            assert_close(got.weight, exact.weight, 2e-6, says=metric)
    error = expected_calibration_error(metrics)
    assert error == pytest.approx(expected_calibration_error(wanted), rel=1e-5)
    assert error > 0


def test_what_a_row_draws_is_normal_and_its_own():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(1000))
    mean, log_variance = jnp.full((1000, 3), 2.0), jnp.full((1000, 3), np.log(0.25))
    run = jax.jit(latents)
    drawn = run(keys, mean, log_variance)
    assert abs(drawn.mean() - 2) < 4 * 0.5 / np.sqrt(drawn.size)
    assert abs(drawn.std() / 0.5 - 1) < 4 / np.sqrt(2 * drawn.size)
    again = run(keys[::-1], mean, log_variance)  # other lanes: the last bit may differ
    assert_close(again, drawn[::-1], 3e-7)
    np.testing.assert_array_equal(latents(None, mean, log_variance), mean)
