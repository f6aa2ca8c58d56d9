"""Labels of every kind, whole, smoothed, soft, narrow, and the ends of the curves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.losses import accuracy, chunked_next_token, confusion
from jtrain.losses.cross_entropy import (
    binary_cross_entropy,
    cross_entropy,
    cross_entropy_per_label,
    distillation,
    soft_cross_entropy,
)
from jtrain.losses.elbo import latents

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("strict_dtypes")]

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)), jnp.float32)
LABELS = jnp.array([0, 4, 2, 2], jnp.int32)
ALL = jnp.ones(4, bool)


def test_a_label_out_of_range_has_the_loss_of_the_nearest_class():
    got = cross_entropy_per_label(LOGITS, jnp.array([-3, 5, 99, 2], jnp.int32))
    np.testing.assert_array_equal(
        got, cross_entropy_per_label(LOGITS, jnp.array([0, 4, 4, 2], jnp.int32))
    )


def test_a_class_that_cannot_be_costs_nothing_where_no_label_asks_for_it():
    barred = LOGITS.at[:, 1].set(-jnp.inf)
    soft = jax.nn.one_hot(LABELS, 5)
    loss = lambda z: soft_cross_entropy(z, soft, ALL)[0].total
    value, grad = jax.jit(jax.value_and_grad(loss))(barred)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    assert_close(value, cross_entropy_per_label(barred, LABELS).sum(), 1e-6)


ONE = jnp.ones(1, bool)


def test_sure_logits_neither_overflow_nor_vanish():
    row = lambda x: jnp.full((1, 1), x)
    of = jax.jit(lambda z, y: binary_cross_entropy(row(z), row(y), ONE)[0].total)
    assert of(1e4, True) == 0
    assert of(1e4, False) == of(-1e4, True) == 1e4
    assert_close(of(0.0, 0.25), np.log(2), 1e-6)
    slope = jax.jit(jax.grad(of))
    assert slope(1e4, 1.0) == 0
    assert slope(-1e4, 1.0) == -1


def test_a_teacher_learns_nothing():
    z = jnp.array([[1.0, 2.0, -1.0]])
    grad = jax.grad(lambda t: distillation(z, t, ONE)[0].total)(z[:, ::-1])
    assert not grad.any()


ROWS, CLASSES, WIDTH = 6, 300, 4
DRAW = np.random.default_rng(0)
WIDE, HIDDEN, HEAD = (
    jnp.asarray(DRAW.standard_normal(shape), jnp.float32)
    for shape in ((ROWS, CLASSES), (2, 3, WIDTH), (CLASSES, WIDTH))
)
ROW_MASK = jnp.asarray(np.ones(ROWS, bool))


def first(output: Any) -> Any:
    mean, metrics = output if isinstance(output, tuple) else (output, {})
    return mean.total / mean.weight, {name: each.total for name, each in metrics.items()}


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy": lambda logits, labels: cross_entropy(logits, labels, ROW_MASK),
    "top 3": lambda logits, labels: accuracy(logits, labels, ROW_MASK, top=3),
    "confusion": lambda logits, labels: confusion(logits, labels, ROW_MASK),
    "in chunks": lambda logits, labels: chunked_next_token(
        HIDDEN + logits[:2, :3, None], HEAD, labels.reshape(2, 3), ROW_MASK.reshape(2, 3)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_labels_in_8_bits_have_the_losses_of_int32(name: str):
    dtype, labels = np.uint8, np.array([3, 10, 44, 100, 120, 200])

    def of(kind: type) -> Any:
        given = jnp.asarray(labels.astype(kind))

        def loss(logits: Any) -> Any:
            value, metrics = first(CASES[name](logits, given))
            return value.sum(), (value, metrics)

        with jax.numpy_dtype_promotion("standard"):  # as where a user calls the loss
            return jax.jit(jax.grad(loss, has_aux=True))(WIDE)

    grad, (value, metrics) = of(np.int32)
    narrow_grad, (narrow, others) = of(dtype)
    assert_close(narrow, value, within=1e-6)
    assert_close(narrow_grad, grad, within=1e-6)
    for metric, total in metrics.items():
        assert_close(others[metric], total, within=1e-6)


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
