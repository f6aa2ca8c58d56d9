"""Weights of rows count in every loss; labels that are no probabilities are named."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance

import jtrain as jt
from jtrain.core.state import new_state
from jtrain.errors import DataError
from jtrain.losses import chunked_next_token, next_token

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(6, 4)).astype(np.float32)
WEIGHT = np.array([2, 0, 1, 3, 1, 1], np.float32)
PARAMS = {"w": DRAW.normal(size=(4, 3)).astype(np.float32)}
TOKENS = DRAW.integers(0, 3, (6, 5)).astype(np.int32)


def three(params, x):
    return x @ params["w"]


def logits(params, tokens):
    return params["w"][tokens]


LOSSES = {
    "classes": (jt.classifier(three), {"x": X, "y": np.arange(6, dtype=np.int32) % 3}),
    "binary": (jt.binary_classifier(three), {"x": X, "y": DRAW.uniform(size=(6, 3)).astype("f4")}),
    "regression": (jt.regression(three), {"x": X, "y": DRAW.normal(size=(6, 3)).astype("f4")}),
    "language": (jt.language_model(logits), {"tokens": TOKENS}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_repeats_its_row_in_training_metrics_and_evaluation(name):
    loss, rows = LOSSES[name]
    repeated = {key: np.repeat(x, WEIGHT.astype(int), 0) for key, x in rows.items()}
    step, ends = jax.jit(jt.make_step(loss, optax.sgd(0.5))), []
    for data in ({**rows, "weight": WEIGHT}, repeated):
        state, metrics = step(new_state(PARAMS, optax.sgd(0.5), jax.random.key(0)), data)
        numbers = {key: mean.value() for key, mean in metrics.items()}
        ends.append((state.params, numbers))
    assert distance(ends[0][0], ends[1][0]) < 1e-6
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)
    if name == "regression":
        found, want = (
            jt.evaluate(loss, PARAMS, data) for data in ({**rows, "weight": WEIGHT}, repeated)
        )
        assert found["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert found["absolute_error"] == pytest.approx(want["absolute_error"], rel=1e-5)


@pytest.mark.thorough
def test_a_row_of_no_weight_may_hold_anything():
    loss, rows = LOSSES["binary"]
    y = np.where(WEIGHT[:, None] == 0, np.float32(np.nan), rows["y"])
    step = jax.jit(jt.make_step(loss, optax.sgd(0.5)))
    data = {"x": X, "y": y, "weight": WEIGHT}
    _, metrics = step(new_state(PARAMS, optax.sgd(0.5), jax.random.key(0)), data)
    assert np.isfinite(metrics["loss"].value())
    jt.check_batch(loss, PARAMS, data)


@pytest.mark.thorough
def test_chunks_weigh_tokens_as_the_whole_does():
    hidden = jnp.asarray(DRAW.normal(size=(6, 4, 4)), jnp.float32)
    head, targets = jnp.asarray(PARAMS["w"].T), jnp.asarray(TOKENS[:, 1:])
    real = jnp.asarray(DRAW.random((6, 4)) < 0.7)
    for weights in (jnp.asarray(WEIGHT), jnp.asarray(DRAW.random((6, 4)), jnp.float32)):
        parts = lambda x, w: chunked_next_token(x, w, targets, real, weights, chunk=3)  # noqa: B023
        whole = lambda x, w: next_token(x @ w.T, targets, real, weights)  # noqa: B023
        ends = []
        for loss in (parts, whole):
            mean = lambda *args: (lambda m: m[0].total / m[0].weight)(loss(*args))  # noqa: B023
            metric = loss(hidden, head)[1]["accuracy"].value()
            ends.append((*jax.value_and_grad(mean, (0, 1))(hidden, head), metric))
        for got, want in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
            assert_close(got, want, 1e-5)


@pytest.mark.thorough
def test_arrays_that_no_part_of_the_loss_reads_are_named_once(caplog):
    loss, rows = LOSSES["regression"]
    data = {**rows, "importance": WEIGHT, "weight": WEIGHT}
    with caplog.at_level(logging.WARNING, "jtrain"):
        for _ in range(2):
            jt.check_batch(loss, PARAMS, data)
            jt.evaluate(loss, PARAMS, data)
    said = [record.message for record in caplog.records if "`importance`" in record.message]
    assert len(said) == 1
    assert "reads `weight`, `x`, `y`" in said[0]
    caplog.clear()

    def reads_in_a_metric(params, batch, rng):
        value, metrics, _ = loss.loss(params, {}, batch, rng)
        return value, {**metrics, "size": jt.Mean.of(batch["importance"], batch["mask"])}

    with caplog.at_level(logging.WARNING, "jtrain"):
        jt.check_batch(reads_in_a_metric, PARAMS, data)
    assert not caplog.records


POINTS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
ZEROS = {"w": np.zeros((4, 3), np.float32)}
SIGNS = np.array([1, -1, 1, 1, -1, 1, -1, -1])
COUNTS = np.array([[2, 1, 1], [0, 4, 0], [1, 0, 0], [3, 3, 3]] * 2)


def logits_of_one(params, x):
    return (x @ params["w"])[:, 0]


def logits_of_three(params, x):
    return x @ params["w"]


def by_loss(params, batch, rng):
    del rng
    return jt.losses.binary_cross_entropy(
        logits_of_one(params, batch["x"]), batch["y"], batch["mask"]
    )


def soft(params, batch, rng):
    del rng
    return jt.losses.soft_cross_entropy(
        logits_of_three(params, batch["x"]), batch["y"], batch["mask"]
    )


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (jt.binary_classifier(logits_of_one), SIGNS),
        (by_loss, 255 * (SIGNS > 0).astype(np.float32)),
        (jt.classifier(logits_of_three), COUNTS.astype(np.float32)),
    ],
)
def test_the_advice_makes_them_probabilities(loss, y):
    with pytest.raises(DataError) as caught:
        jt.check_batch(loss, ZEROS, {"x": POINTS, "y": y})
    assert re.search(r"row [0-7] of the batch holds", str(caught.value))
    advice = re.search(r"Give `(.*?)`", str(caught.value))[1].removesuffix(" of logits")
    given = eval(advice, {"y": y, "jax": jax})
    jt.check_batch(loss, ZEROS, {"x": POINTS, "y": np.asarray(given)})


def test_rows_without_a_label_get_no_weight():
    loss, y = jt.binary_classifier(logits_of_one), np.where(SIGNS > 0, 1, np.nan)
    with pytest.raises(DataError) as caught:
        jt.check_batch(loss, ZEROS, {"x": POINTS, "y": y})
    weight = eval(re.search(r"Give `weight=(.*?)`", str(caught.value))[1], {"y": y})
    assert weight.tolist() == (SIGNS > 0).tolist()
    jt.check_batch(loss, ZEROS, {"x": POINTS, "y": y, "weight": weight})


@pytest.mark.thorough
def test_what_is_hidden_and_what_is_right_is_accepted():
    mask = SIGNS > 0
    hidden = {"x": POINTS, "y": np.where(mask, 1, np.nan), "row": np.arange(8), "mask": mask}
    for loss in (jt.binary_classifier(logits_of_one), by_loss):
        jt.check_batch(loss, ZEROS, hidden)
        jt.check_batch(loss, ZEROS, {"x": POINTS, "y": np.float32(mask) * 0.9})
    chances = np.float32(COUNTS / COUNTS.sum(-1, keepdims=True))
    jt.check_batch(
        jt.classifier(logits_of_three), ZEROS, {"x": POINTS, "y": chances.astype(jnp.bfloat16)}
    )
    jt.check_batch(soft, ZEROS, {"x": POINTS, "y": np.float32(COUNTS)})  # need not add up to 1

    def ignoring(params, batch, rng):
        real = batch["mask"] & (batch["y"] >= 0)
        return jt.losses.binary_cross_entropy(logits_of_one(params, batch["x"]), batch["y"], real)

    jt.check_batch(ignoring, ZEROS, {"x": POINTS, "y": np.float32(SIGNS)})
