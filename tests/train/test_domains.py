"""Labels that are no probabilities are named before anything trains on them, with what to type."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.errors import DataError, LossError

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
PARAMS = {"w": np.zeros((4, 3), np.float32)}
SIGNS = np.array([1, -1, 1, 1, -1, 1, -1, -1])
COUNTS = np.array([[2, 1, 1], [0, 4, 0], [1, 0, 0], [3, 3, 3]] * 2)


def one(params, x):
    return (x @ params["w"])[:, 0]


def three(params, x):
    return x @ params["w"]


def by_loss(params, batch, rng):
    del rng
    return jt.losses.binary_cross_entropy(one(params, batch["x"]), batch["y"], batch["mask"])


def soft(params, batch, rng):
    del rng
    return jt.losses.soft_cross_entropy(three(params, batch["x"]), batch["y"], batch["mask"])


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (jt.binary_classifier(one), SIGNS),
        (jt.binary_classifier(one), (SIGNS + 3) // 2),
        (by_loss, 255 * (SIGNS > 0).astype(np.float32)),
        (jt.binary_classifier(one), np.where(SIGNS > 0, 2.5, 0.5)),
        (jt.classifier(three), COUNTS.astype(np.float32)),
        (jt.classifier(three), np.float32(SIGNS[:, None] * [[3, 0.5, 1]])),
        (soft, np.float32(COUNTS) - 0.5),
    ],
)
def test_the_advice_makes_them_probabilities(loss, y):
    with pytest.raises(DataError) as caught:
        jt.check_batch(loss, PARAMS, {"x": X, "y": y})
    assert re.search(r"row [0-7] of the batch holds", str(caught.value))
    advice = re.search(r"Give `(.*?)`", str(caught.value))[1].removesuffix(" of logits")
    given = eval(advice, {"y": y, "jax": jax})
    jt.check_batch(loss, PARAMS, {"x": X, "y": np.asarray(given)})


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (jt.binary_classifier(one), np.where(SIGNS > 0, 1, np.nan)),
        (
            jt.classifier(three),
            np.float32(np.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]] * (SIGNS > 0)[:, None]),
        ),
    ],
)
def test_rows_without_a_label_get_no_weight(loss, y):
    with pytest.raises(DataError) as caught:
        jt.check_batch(loss, PARAMS, {"x": X, "y": y})
    weight = eval(re.search(r"Give `weight=(.*?)`", str(caught.value))[1], {"y": y})
    assert weight.tolist() == (SIGNS > 0).tolist()
    jt.check_batch(loss, PARAMS, {"x": X, "y": y, "weight": weight})


def test_what_is_hidden_and_what_is_right_is_accepted():
    mask = SIGNS > 0
    hidden = {"x": X, "y": np.where(mask, 1, np.nan), "row": np.arange(8), "mask": mask}
    for loss in (jt.binary_classifier(one), by_loss):
        jt.check_batch(loss, PARAMS, hidden)
        jt.check_batch(loss, PARAMS, {"x": X, "y": np.float32(mask) * 0.9})
    chances = np.float32(COUNTS / COUNTS.sum(-1, keepdims=True))
    jt.check_batch(jt.classifier(three), PARAMS, {"x": X, "y": chances.astype(jnp.bfloat16)})
    jt.check_batch(soft, PARAMS, {"x": X, "y": np.float32(COUNTS)})  # need not add up to 1

    def ignoring(params, batch, rng):
        real = batch["mask"] & (batch["y"] >= 0)
        return jt.losses.binary_cross_entropy(one(params, batch["x"]), batch["y"], real)

    jt.check_batch(ignoring, PARAMS, {"x": X, "y": np.float32(SIGNS)})


def test_fit_and_evaluate_name_the_row():
    data = {"x": X, "y": np.where(np.arange(8) == 5, 3, 1)}
    with pytest.raises(DataError, match=r"row 5 of the data\) holds 3"):
        jt.fit(jt.binary_classifier(one), PARAMS, data, steps=1, batch=8)
    with pytest.raises(DataError, match="row 5 of the first batch holds 3"):
        jt.evaluate(jt.binary_classifier(one), PARAMS, data)
    assert jt.evaluate(jt.binary_classifier(one), PARAMS, data, check_batch=False)["rows"] == 8


def test_labels_of_another_type_are_refused():
    mask = jnp.ones(8, bool)
    logits = jnp.zeros((8, 3))
    with pytest.raises(LossError, match=r"labels.astype\(jnp.int32\)"):
        inspect.unwrap(jt.losses.cross_entropy)(logits, jnp.full(8, 0.7), mask)
    with pytest.raises(LossError, match="desirable > 0"):
        inspect.unwrap(jt.losses.kto)(
            *[jnp.zeros(8)] * 2, jnp.asarray(SIGNS), *[jnp.zeros(8)] * 2, mask
        )
