"""Weights and masks of rows count in every loss; labels that are not probabilities are named."""

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name
from comparison import assert_close, distance

import jtrain as jt
from jtrain.core.state import new_state
from jtrain.data import Arrays, Shuffled
from jtrain.errors import DataError, LossError
from jtrain.losses import chunked_next_token, next_token
from jtrain.parallel import FSDP, Mirrored

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
        weighed = {**rows, "weight": WEIGHT}
        found, want = (jt.evaluate(loss, PARAMS, data) for data in (weighed, repeated))
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
    return three(params, x)[:, 0]


def by_loss(params, batch, rng):
    del rng
    logits = logits_of_one(params, batch["x"])
    return jt.losses.binary_cross_entropy(logits, batch["y"], batch["mask"])


def soft(params, batch, rng):
    del rng
    logits = three(params, batch["x"])
    return jt.losses.soft_cross_entropy(logits, batch["y"], batch["mask"])


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (jt.binary_classifier(logits_of_one), SIGNS),
        (by_loss, 255 * (SIGNS > 0).astype(np.float32)),
        (jt.classifier(three), COUNTS.astype(np.float32)),
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
    jt.check_batch(jt.classifier(three), ZEROS, {"x": POINTS, "y": chances.astype(jnp.bfloat16)})
    jt.check_batch(soft, ZEROS, {"x": POINTS, "y": np.float32(COUNTS)})  # need not add up to 1

    def ignoring(params, batch, rng):
        real = batch["mask"] & (batch["y"] >= 0)
        return jt.losses.binary_cross_entropy(logits_of_one(params, batch["x"]), batch["y"], real)

    jt.check_batch(ignoring, ZEROS, {"x": POINTS, "y": np.float32(SIGNS)})


ROWS = 50
DRAWN = np.random.default_rng(0)
WIDE = DRAWN.normal(size=(ROWS, 3)).astype(np.float32)
DATA = {
    "x": WIDE,
    "y": (WIDE[:, 0] > 0).astype(np.float32),
    "valid": DRAWN.random(ROWS) < 0.8,
    "words": DRAWN.random((ROWS, 3)) < 0.8,
    "w": DRAWN.random(ROWS).astype(np.float32) + 0.5,
}
SLOPE = {"w": jnp.full(3, 0.3)}
NOTHING = {"w": jnp.zeros(3)}


def nats(params, batch):
    return optax.sigmoid_binary_cross_entropy(batch["x"] @ params["w"], batch["y"])


def own_mask(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["valid"], batch["w"])


def its_line(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["valid"] & batch["mask"], batch["w"])


def masked(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["mask"])


def all_rows(params, batch, rng):
    return jt.Mean.of(nats(params, batch), jnp.ones_like(batch["mask"]))


def centred(params, batch, rng):
    x = nats(params, batch)
    return jt.Mean.of(jnp.square(x - jnp.mean(x)), batch["mask"])


def centred_rightly(params, batch, rng):
    x = nats(params, batch)
    return jt.Mean.of(jnp.square(x - jnp.mean(x, where=batch["mask"])), batch["mask"])


def statistic(mask: Callable) -> Any:
    return jt.stateful(
        lambda params, extra, batch, rng: (
            masked(params, batch, rng),
            {},
            {"mean": jt.Mean.of(batch["x"][:, 0], mask(batch))},
        )
    )


def ones(batch):
    return jnp.ones_like(batch["mask"])


# A loss, its initial parameters, and the start of the line that its message advises.
OWN, VISIBLE = 'batch["valid"] & batch["mask"])', 'jt.Mean.of(values, batch["mask"])'
COUNTING = {
    "own mask": (own_mask, SLOPE, OWN),
    "all rows, parameters of zero": (all_rows, NOTHING, VISIBLE),
    "rows that meet": (centred, SLOPE, 'jnp.mean(x, where=batch["mask"])'),
}
SOME = ("own mask", "rows that meet")


@pytest.mark.thorough
@pytest.mark.parametrize("case", by_name(COUNTING, SOME, pytest.mark.thorough))
def test_an_evaluation_refuses_a_loss_that_counts_padding_and_names_the_line(case):
    loss, params, line = case
    with pytest.raises(LossError) as error:
        jt.evaluate(loss, params, DATA, batch=16, devices=2)
    assert line in str(error.value)
    # No batch has padding.
    full = {key: array[:48] for key, array in DATA.items()}
    jt.evaluate(loss, params, full, batch=16, devices=2)


@pytest.mark.thorough
def test_the_line_gives_one_result_for_every_batch_size():
    mask, weight = DATA["valid"], DATA["w"]
    values = np.asarray(nats(SLOPE, DATA), np.float64)
    expected = (values * mask * weight).sum() / (mask * weight).sum()
    for size in (16, 32):
        loss = jt.evaluate(its_line, SLOPE, DATA, batch=size, devices=1)["loss"]
        assert loss == pytest.approx(expected, rel=1e-6)
    assert abs(jt.evaluate(own_mask, SLOPE, DATA, batch=32, check_batch=False)["loss"] - loss) > 0


def each_row(params, batch, rng):
    values = nats(params, batch)
    each = {"of weights": jt.Mean(values, batch["mask"].astype(jnp.float32))}
    return masked(params, batch, rng), each | {"of all": jt.Mean(values, jnp.float32(1))}


def with_shift(params, batch, rng):
    """Subtract the largest of all rows, hidden ones too, from the logits of a softmax."""
    logits = 100 * nats(params, batch)
    shifted = jnp.where(batch["mask"], jnp.exp(logits - logits.max()), 0)
    return jt.Mean(jnp.log(shifted.sum()) + logits.max(), jnp.float32(1))


EXACT = {
    "its line": its_line,
    "coupled, hidden rightly": centred_rightly,
    "a value for each row": each_row,
    "a shift of all rows": with_shift,
    "a logarithm of padding": lambda params, batch, rng: jt.Mean.of(
        jnp.log(batch["x"][:, 0]) * 0 + nats(params, batch), batch["mask"] & (batch["x"][:, 0] > 0)
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("loss", by_name(EXACT, ("a shift of all rows",), pytest.mark.thorough))
def test_losses_that_hide_their_rows_are_let_through(loss):
    """Also where rows meet, where values of hidden rows change, and where some are NaN."""
    for params in (SLOPE, NOTHING):
        jt.evaluate(loss, params, DATA, batch=16, devices=2)


def test_visible_weights_may_add_up_to_the_number_of_rows():
    def weighted(params, batch, rng):
        return jt.Mean.of(params["slope"] * batch["x"], batch["mask"], batch["weight"])

    rows = {"x": np.ones(7, np.float32), "weight": np.float32([0, 4, 2, 2, 1, 1, 1])}
    assert jt.evaluate(weighted, {"slope": np.ones(())}, rows, batch=8, devices=1)["loss"] == 1


def test_a_copy_for_each_row_counts_no_padding():
    parallel = Mirrored(devices=8, impl="shard_map")
    found = jt.evaluate(its_line, SLOPE, DATA, batch=8, parallel=parallel)
    assert found["rows"] == len(DATA["valid"])


@pytest.mark.thorough
def test_a_check_of_ones_own_loop_looks_at_batches_with_hidden_rows():
    batch = {key: array[:8] for key, array in DATA.items()} | {"row": np.arange(8, dtype=np.int32)}
    jt.check_batch(own_mask, SLOPE, batch | {"mask": np.ones(8, bool)})
    hidden = batch | {"mask": np.arange(8) < 6}
    with pytest.raises(LossError, match="counts rows that the mask hides"):
        jt.check_batch(own_mask, SLOPE, hidden)
    jt.check_batch(its_line, SLOPE, hidden)


QUICK: dict[str, Any] = {"steps": 2, "quiet": True, "lr": 0.1}


def padded(end: str = "pad") -> Shuffled:
    return Shuffled(Arrays(**DATA), size=16, end=end)


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [Mirrored(devices=4, impl="shard_map"), FSDP(devices=2)])
def test_microbatches_and_running_statistics_are_checked_under_every_layout(parallel, compiled):
    how: dict[str, Any] = {
        **QUICK,
        "microbatches": 2,
        "parallel": parallel,
        "extra": {"mean": jnp.float32(0)},
    }
    with pytest.raises(LossError, match="the leaf 'mean' of extra counts rows"):
        jt.fit(statistic(ones), SLOPE, padded(), **how)
    jt.fit(statistic(lambda batch: batch["mask"]), SLOPE, padded(), **how)
    jt.fit(statistic(ones), SLOPE, padded("drop"), **how)
