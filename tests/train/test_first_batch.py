"""The first batch is checked: out-of-range labels, and rows that are broadcast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name
from jaxtyping import config as jaxtyping_config

import jtrain as jt
from jtrain.errors import DataError, LossError
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.shapes import in_range
from jtrain.parallel import FSDP
from jtrain.train.check_batch.first_batch import _log_repeated
from jtrain.train.check_batch.uses import find_uses

ROWS, CLASSES, BAD = 8, 10, 5
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)).astype(np.float32)
LABELS = DRAW.integers(1, CLASSES - 1, ROWS).astype(np.int32)


def batch(label: Any = None, **more: Any) -> dict[str, np.ndarray]:
    """Eight rows, one of which has this label."""
    labels = LABELS if label is None else np.where(np.arange(ROWS) == BAD, label, LABELS)
    return {"x": X, "label": labels.astype(np.int32), **more}


def logits(params, batch):
    return batch["x"] @ params["w"]


PARAMS = {"w": jnp.zeros((3, CLASSES)), "table": jnp.zeros((CLASSES, 3))}
optax_nats = optax.softmax_cross_entropy_with_integer_labels


def by_vmap(params, batch, rng):
    del rng
    one = lambda z, y: -jax.nn.log_softmax(z)[y]
    return jt.Mean.of(jax.vmap(one)(logits(params, batch), batch["label"]), batch["mask"])


def by_one_hot(params, batch, rng):
    del rng
    chosen = jax.nn.one_hot(batch["label"], CLASSES)
    return jt.Mean.of(optax.softmax_cross_entropy(logits(params, batch), chosen), batch["mask"])


def by_scan(params, batch, rng):
    del rng

    def add(total, row):
        return total + optax_nats(row["x"] @ params["w"], row["label"]) * row["mask"], None

    total, _ = jax.lax.scan(add, jnp.float32(0), dict(batch))
    return jt.Mean(total, batch["mask"].sum(dtype=jnp.float32))


def in_a_table(params, batch, rng):
    del rng
    return jt.Mean.of((params["table"][batch["label"]] - 1).sum(-1), batch["mask"])


COUNTED: dict[str, Callable] = {
    "cross_entropy": lambda p, b, rng: cross_entropy(logits(p, b), b["label"], b["mask"]),
    "chunked_next_token": lambda p, b, rng: chunked_next_token(
        b["x"][:, None], p["w"].T, b["label"][:, None], b["mask"][:, None]
    ),
    "optax": lambda p, b, rng: jt.Mean.of(optax_nats(logits(p, b), b["label"]), b["mask"]),
    "by vmap": by_vmap,
    "one_hot": by_one_hot,
    "scan": by_scan,
    "a table": in_a_table,
    "of labels that count from 1": jax.jit(
        lambda p, b, rng: jt.Mean.of(optax_nats(logits(p, b), b["label"] - 1), b["mask"])
    ),
}
QUICK = ("cross_entropy", "by vmap", "scan")


@pytest.mark.parametrize("loss", by_name(COUNTED, QUICK, pytest.mark.thorough))
def test_a_label_that_chooses_no_class_is_named_with_its_row_and_the_shape(loss):
    from_one = loss is COUNTED["of labels that count from 1"]
    jt.check_batch(loss, PARAMS, batch())
    for label in (CLASSES + from_one, -100):
        with pytest.raises(DataError) as caught:
            jt.check_batch(loss, PARAMS, batch(label))
        told = str(caught.value)
        assert f"row {BAD} of the batch holds {label}." in told
        assert f"one of {CLASSES} entries, 0 .. {CLASSES - 1}, of an array of shape (" in told
        assert ("count from 1" in told) == (label == CLASSES)
        assert ("`label % 10`" in told) == (label < 0)


def known(batch):
    """Return the mask of the labels that count, as it is often written."""
    return batch["mask"] & (batch["label"] >= 0)


def left_out_by_zeros(params, batch, rng):
    """Compute a loss in which a one-hot row of zeros adds nothing and has no weight."""
    del rng
    chances = jax.nn.log_softmax(logits(params, batch))
    chosen = jax.nn.one_hot(batch["label"], CLASSES)
    return jt.Mean(-(chosen * chances).sum(), known(batch).sum(dtype=jnp.float32))


LEFT_OUT: dict[str, Callable] = {
    "cross_entropy": lambda p, b, rng: cross_entropy(logits(p, b), b["label"], known(b)),
    "optax": lambda p, b, rng: jt.Mean.of(optax_nats(logits(p, b), b["label"]), known(b)),
    "one_hot": left_out_by_zeros,
    "clipped on purpose": lambda p, b, rng: jt.Mean.of(
        p["table"][b["label"].clip(0, CLASSES - 1)].sum(-1), b["mask"]
    ),
}
SOME = ("optax", "one_hot")


@pytest.mark.thorough
@pytest.mark.parametrize("loss", by_name(LEFT_OUT, SOME, pytest.mark.thorough))
def test_a_label_that_the_loss_leaves_out_is_right(loss):
    jt.check_batch(loss, PARAMS, batch(-1))


@pytest.mark.thorough
def test_a_weight_of_the_batchs_own_leaves_it_out_unless_its_value_is_nan():
    def loss(params, batch, rng):
        del rng
        values = optax_nats(logits(params, batch), batch["label"])
        return jt.Mean.of(values, batch["mask"], batch["weight"])

    weight = np.where(np.arange(ROWS) == BAD, 0, 1).astype(np.float32)
    jt.check_batch(loss, PARAMS, batch(-1, weight=weight))
    with pytest.raises(DataError, match="holds -100"):  # JAX fills with NaN, and 0 x NaN is NaN
        jt.check_batch(loss, PARAMS, batch(-100, weight=weight))


@pytest.mark.thorough
def test_what_the_mask_hides_may_be_any_label():
    mask = np.arange(ROWS) != BAD
    jt.check_batch(COUNTED["optax"], PARAMS, batch(255, mask=mask))
    some = batch(255, mask=mask)
    some["label"][2] = 11
    with pytest.raises(DataError, match=r"row 2 of the batch holds 11\."):
        jt.check_batch(COUNTED["optax"], PARAMS, some)


def test_the_mark_of_a_label_is_no_operation():
    marked = jax.jit(lambda z, y: jnp.take_along_axis(z, in_range(y, z, -1), -1, mode="clip"))
    plain = jax.jit(lambda z, y: jnp.take_along_axis(z, y, -1, mode="clip"))
    given = jnp.zeros((4, 10)), jnp.zeros((4, 1), jnp.int32)
    text = lambda fn: fn.lower(*given).as_text().replace("_lambda_", "")
    assert text(marked) == text(plain)
    program = jax.make_jaxpr(lambda z, b: marked(z, b["y"]))(given[0], {"y": given[1]})
    found = find_uses(program, {"y": jax.ShapeDtypeStruct((4, 1), jnp.int32)}).found
    assert [(use.entries, use.shape) for use in found] == [(10, (4, 10))]


# A softmax of a softmax


BINARY = optax.sigmoid_binary_cross_entropy
REPEATED = {
    "softmax": lambda z, y: cross_entropy(jax.nn.softmax(z), y, jnp.ones(ROWS, bool))[0].total,
    "softmax of optax": lambda z, y: optax_nats(jax.nn.softmax(z), y).sum(),
    "sigmoid": lambda z, y: BINARY(jax.nn.sigmoid(z[:, 0]), y > 4).sum(),
}
RIGHT = {
    "a log softmax": lambda z, y: optax_nats(jax.nn.log_softmax(z), y).sum(),
    "attention": lambda z, y: optax_nats(jax.nn.softmax(z @ z.T) @ z, y).sum(),
    "a gate": lambda z, y: BINARY(jax.nn.silu(z[:, 0]), y > 4).sum(),
}


@pytest.mark.parametrize("name", REPEATED | RIGHT)
def test_a_softmax_of_a_softmax_is_named(name, caplog):
    loss = (REPEATED | RIGHT)[name]
    _log_repeated.cache_clear()
    jt.check_batch(
        lambda p, b, _: jt.Mean(loss(logits(p, b), b["label"]), 1.0 * ROWS), PARAMS, batch()
    )
    assert (f"ends in a {name.split()[0]}, and" in caplog.text) == (name in REPEATED)


# Where it is looked


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_fit_and_evaluate_refuse_it_where_rows_are_split():
    parallel = FSDP(devices=4, min_size=0)
    many = np.tile(np.arange(ROWS), 8)
    rows = lambda label: {"x": X[many], "label": batch(label)["label"][many]}
    call = {"steps": 2, "batch": 32, "quiet": True, "parallel": parallel}
    loss, params = LEFT_OUT["optax"], jax.tree.map(np.asarray, {"w": PARAMS["w"]})
    with pytest.raises(DataError, match=r"of the first batch \(row \d+ of the data\) holds 10\."):
        jt.fit(loss, params, rows(CLASSES), **call)
    with pytest.raises(DataError, match=r"row 5 of the first batch of `valid` holds 10\."):
        jt.fit(loss, params, rows(-1), **call, valid=rows(CLASSES))
    with pytest.raises(DataError, match=r"row 5 of the first batch holds 10\."):
        jt.evaluate(loss, params, rows(CLASSES), batch=32, parallel=parallel)
    fitted = jt.fit(loss, params, rows(-1), **call, valid=rows(-1))
    assert np.isfinite(fitted.history["loss"][2])
    assert jt.evaluate(loss, params, rows(-1), batch=32, parallel=parallel)["rows"] == 64
    nearest = COUNTED["cross_entropy"]
    assert jt.fit(nearest, params, rows(CLASSES), **call, check_batch=False).step == 2


# Rows that are broadcast

PAIR = {"w": jnp.zeros((3, 1))}
Y = DRAW.normal(size=ROWS).astype(np.float32)


def column(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) + 0.5  # b 1


BROADCAST: dict[str, tuple[Callable, str]] = {
    "a scalar": (lambda p, b, rng: jnp.square(column(p, b) - b["y"]).mean(), "sub"),
    "in a jit": (jax.jit(lambda p, b, rng: abs(column(p, b) - b["y"]).mean()), "sub"),
    "a weight": (
        lambda p, b, rng: jt.Mean((column(p, b) * b["y"]).sum(), jnp.float32(ROWS)),
        "mul",
    ),
}
MEANT: dict[str, Callable] = {
    "pairs of targets": lambda p, b, rng: (
        jnp.square(b["y"][:, None] - b["y"]).mean() + column(p, b).mean()
    ),
    "one row": lambda p, b, rng: jnp.square(column(p, b) - b["y"][None]).mean(),
    "another": lambda p, b, rng: jnp.square(column(p, b)[:, 0] - b["y"]).mean(),
    "a row for each": lambda p, b, rng: jax.vmap(lambda x, y: jnp.square(x @ p["w"] - y).sum())(
        b["x"], b["y"]
    ).mean(),
}


@pytest.fixture
def as_people_run_it():
    """Broadcast leading dims silently, as by default; shapes are not checked."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    with jax.numpy_rank_promotion("allow"):
        yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.usefixtures("as_people_run_it")
def test_a_column_against_a_row_of_rows_is_named_with_both_shapes(name):
    loss, operation = BROADCAST[name]
    with pytest.raises(LossError) as caught:
        jt.check_batch(loss, PAIR, {"x": X, "y": Y})
    told = str(caught.value)
    assert f"`{operation}` takes arrays of shapes (8, 1) and (8,) element by element" in told
    assert "`y[:, None]` for the second" in told


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.usefixtures("as_people_run_it")
def test_pairs_that_are_meant_are_let_through(name):
    jt.check_batch(MEANT[name], PAIR, {"x": X, "y": Y})
