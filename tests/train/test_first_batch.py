"""The first batch is checked: out-of-range labels, and rows that are broadcast."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name
from jaxtyping import config as jaxtyping_config
from quick_study import CODE, at_home, trained, write_study

import jtrain as jt
from jtrain.errors import DataError, LossError
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.cross_entropy import cross_entropy, cross_entropy_per_label
from jtrain.losses.index_marks import in_range
from jtrain.losses.next_token import next_token
from jtrain.losses.squared_error import squared_error
from jtrain.parallel import FSDP, Mirrored
from jtrain.train.first_batch.index_uses import find_uses

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


def by_index(params, batch, rng):
    del rng
    chosen = jax.nn.log_softmax(logits(params, batch))[jnp.arange(ROWS), batch["label"]]
    return jt.Mean.of(-chosen, batch["mask"])


def by_vmap(params, batch, rng):
    del rng
    one = lambda z, y: -jax.nn.log_softmax(z)[y]
    return jt.Mean.of(jax.vmap(one)(logits(params, batch), batch["label"]), batch["mask"])


def by_take(params, batch, rng):
    del rng
    chances = jax.nn.log_softmax(logits(params, batch))
    chosen = jnp.take_along_axis(chances, batch["label"][:, None], -1)[:, 0]
    return jt.Mean.of(-chosen, batch["mask"])


def by_one_hot(params, batch, rng):
    del rng
    chosen = jax.nn.one_hot(batch["label"], CLASSES)
    return jt.Mean.of(optax.softmax_cross_entropy(logits(params, batch), chosen), batch["mask"])


def by_smooth_one_hot(params, batch, rng):
    del rng
    chosen = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES), 0.1)
    return jt.Mean.of(optax.softmax_cross_entropy(logits(params, batch), chosen), batch["mask"])


def by_where(params, batch, rng):
    del rng
    chances = jax.nn.log_softmax(logits(params, batch))
    own = np.arange(CLASSES)[None] == batch["label"][:, None]
    return jt.Mean.of(-jnp.where(own, chances, 0).sum(-1), batch["mask"])


def by_scan(params, batch, rng):
    del rng

    def add(total, row):
        return total + optax_nats(row["x"] @ params["w"], row["label"]) * row["mask"], None

    total, _ = jax.lax.scan(add, jnp.float32(0), dict(batch))
    return jt.Mean(total, batch["mask"].sum(dtype=jnp.float32))


def by_remat(params, batch, rng):
    del rng
    values = jax.checkpoint(lambda w: optax_nats(batch["x"] @ w, batch["label"]))(params["w"])
    return jt.Mean.of(values, batch["mask"])


def in_a_table(params, batch, rng):
    del rng
    return jt.Mean.of((params["table"][batch["label"]] - 1).sum(-1), batch["mask"])


COUNTED: dict[str, Callable] = {
    "cross_entropy": lambda p, b, rng: cross_entropy(logits(p, b), b["label"], b["mask"]),
    "smoothed cross_entropy": lambda p, b, rng: cross_entropy(
        logits(p, b), b["label"], b["mask"], smoothing=0.1
    ),
    "nats, a scalar": lambda p, b, rng: cross_entropy_per_label(logits(p, b), b["label"]).mean(),
    "next_token": lambda p, b, rng: next_token(
        logits(p, b)[:, None], b["label"][:, None], b["mask"][:, None]
    ),
    "chunked_next_token": lambda p, b, rng: chunked_next_token(
        b["x"][:, None], p["w"].T, b["label"][:, None], b["mask"][:, None]
    ),
    "optax": lambda p, b, rng: jt.Mean.of(optax_nats(logits(p, b), b["label"]), b["mask"]),
    "optax, a scalar": lambda p, b, rng: optax_nats(logits(p, b), b["label"]).mean(),
    "by index": by_index,
    "by vmap": by_vmap,
    "take_along_axis": by_take,
    "one_hot": by_one_hot,
    "a smooth one_hot": by_smooth_one_hot,
    "where": by_where,
    "scan": by_scan,
    "remat": by_remat,
    "a table": in_a_table,
    "in a jit": jax.jit(by_take),
    "of labels that count from 1": lambda p, b, rng: jt.Mean.of(
        optax_nats(logits(p, b), b["label"] - 1), b["mask"]
    ),
}
QUICK = ("cross_entropy", "chunked_next_token", "optax, a scalar", "one_hot", "by vmap", "scan")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", by_name(COUNTED, QUICK, pytest.mark.thorough))
def test_a_label_that_chooses_no_class_is_named_with_its_row_and_the_shape(loss):
    from_one = loss is COUNTED["of labels that count from 1"]
    jt.check_batch(loss, PARAMS, batch())
    for label in (CLASSES + from_one, 255, -1, -100):
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


def a_focal_loss(params, batch, rng):
    """Compute a loss in which -1 is the background of a detector: every class is wrong."""
    del rng
    wanted = jax.nn.one_hot(batch["label"], CLASSES)
    values = optax.sigmoid_focal_loss(logits(params, batch), wanted).sum(-1)
    return jt.Mean.of(values, batch["mask"])


def an_unknown_category(params, batch, rng):
    """Compute a loss in which zeros stand for an unknown category."""
    del rng
    hidden = jax.nn.one_hot(batch["label"], CLASSES) @ params["table"]
    return jt.Mean.of(jax.nn.log_softmax(hidden @ params["w"])[:, 0], batch["mask"])


def the_last_position(params, batch, rng):
    """Compute a loss at the hidden state of a position; a row without one has no weight."""
    del rng
    hidden = jnp.tanh(batch["x"][:, None] * params["w"][:1].T[None])  # b 10 3
    last = hidden[jnp.arange(ROWS), batch["label"]]
    return jt.Mean.of(last.sum(-1), known(batch))


LEFT_OUT: dict[str, Callable] = {
    "cross_entropy": lambda p, b, rng: cross_entropy(logits(p, b), b["label"], known(b)),
    "optax": lambda p, b, rng: jt.Mean.of(optax_nats(logits(p, b), b["label"]), known(b)),
    "optax of a label put in": lambda p, b, rng: jt.Mean.of(
        optax_nats(logits(p, b), jnp.where(b["label"] < 0, 0, b["label"])), known(b)
    ),
    "optax times the mask": lambda p, b, rng: jt.Mean(
        (cross_entropy_per_label(logits(p, b), b["label"]) * known(b)).sum(),
        known(b).sum(dtype=jnp.float32),
    ),
    "one_hot": left_out_by_zeros,
    "clipped on purpose": lambda p, b, rng: jt.Mean.of(
        p["table"][b["label"].clip(0, CLASSES - 1)].sum(-1), b["mask"]
    ),
    "filled on purpose": lambda p, b, rng: jt.Mean.of(
        p["table"].at[b["label"]].get(mode="fill", fill_value=0).sum(-1), b["mask"]
    ),
    "from the end on purpose": lambda p, b, rng: jt.Mean.of(
        p["table"][b["label"] % CLASSES].sum(-1), b["mask"]
    ),
    "focal": a_focal_loss,
    "a category": an_unknown_category,
    "a position": the_last_position,
    "no integer": lambda p, b, rng: jt.Mean.of(logits(p, b).sum(-1) - b["label"], b["mask"]),
}
SOME = ("cross_entropy", "optax", "one_hot", "focal")


@pytest.mark.parametrize("loss", by_name(LEFT_OUT, SOME, pytest.mark.thorough))
@pytest.mark.parametrize("label", [-1, pytest.param(-100, marks=pytest.mark.thorough)])
def test_a_label_that_the_loss_leaves_out_is_right(loss, label):
    jt.check_batch(loss, PARAMS, batch(label))


def test_a_weight_of_the_batchs_own_leaves_it_out_unless_its_value_is_nan():
    def loss(params, batch, rng):
        del rng
        values = optax_nats(logits(params, batch), batch["label"])
        return jt.Mean.of(values, batch["mask"], batch["weight"])

    weight = np.where(np.arange(ROWS) == BAD, 0, 1).astype(np.float32)
    jt.check_batch(loss, PARAMS, batch(-1, weight=weight))
    with pytest.raises(DataError, match="holds -100"):  # JAX fills with NaN, and 0 x NaN is NaN
        jt.check_batch(loss, PARAMS, batch(-100, weight=weight))


@pytest.mark.parametrize("name", ["cross_entropy", "optax", "one_hot"])
def test_what_the_mask_hides_may_be_any_label(name):
    mask = np.arange(ROWS) != BAD
    jt.check_batch(COUNTED[name], PARAMS, batch(255, mask=mask))
    some = batch(255, mask=mask)
    some["label"][2] = 11
    with pytest.raises(DataError, match=r"row 2 of the batch holds 11\."):
        jt.check_batch(COUNTED[name], PARAMS, some)


def test_one_kind_is_left_out_and_another_is_counted():
    some = batch(-100)
    some["label"][2] = CLASSES
    with pytest.raises(DataError, match=r"row 2 of the batch holds 10\."):
        jt.check_batch(LEFT_OUT["optax"], PARAMS, some)


def test_tokens_outside_of_the_vocabulary_are_found_in_the_table():
    def loss(params, batch, rng):
        del rng
        hidden = params["table"][batch["tokens"]]
        return jt.Mean.of(hidden.sum((1, 2)), batch["mask"])

    tokens = DRAW.integers(0, CLASSES, (ROWS, 6)).astype(np.int32)
    jt.check_batch(loss, PARAMS, {"tokens": tokens})
    tokens[3, 4] = CLASSES
    with pytest.raises(DataError, match=r"`tokens` chooses .* shape \(10, 3\), and row 3 of"):
        jt.check_batch(loss, PARAMS, {"tokens": tokens})


def test_the_mark_of_a_label_is_no_operation():
    marked = jax.jit(lambda z, y: jnp.take_along_axis(z, in_range(y, z, -1), -1, mode="clip"))
    plain = jax.jit(lambda z, y: jnp.take_along_axis(z, y, -1, mode="clip"))
    given = jnp.zeros((4, 10)), jnp.zeros((4, 1), jnp.int32)
    text = lambda fn: fn.lower(*given).as_text().replace("_lambda_", "")
    assert text(marked) == text(plain)
    program = jax.make_jaxpr(lambda z, b: marked(z, b["y"]))(given[0], {"y": given[1]})
    found = find_uses(program, {"y": jax.ShapeDtypeStruct((4, 1), jnp.int32)}).found
    assert [(use.entries, use.shape) for use in found] == [(10, (4, 10))]


# Where it is looked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


LAYOUTS: dict[str, Any] = {
    "one device": "single",
    "shard_map": Mirrored(impl="shard_map", devices=4),
    "fsdp": FSDP(devices=4, min_size=0),
    "pmap": Mirrored(impl="pmap", devices=2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", by_name(LAYOUTS, ("one device",), pytest.mark.slow))
@pytest.mark.usefixtures("here")
def test_fit_and_evaluate_refuse_it_under_every_layout(parallel):
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


@pytest.mark.thorough
def test_a_run_refuses_it_before_anything_is_written(tmp_path, monkeypatch, compiled):
    hole = "        check_labels(train, self.data.classes)\n"
    code = CODE.replace(hole, "").replace("(3, size=rows)", "(4, size=rows)")
    code = code.replace("[-1, -1]])[label]", "[-1, -1], [1, 1]])[label]")
    path = write_study(tmp_path, code)
    at_home(tmp_path, monkeypatch, compiled)
    with pytest.raises(DataError, match=r"row \d+ of the first batch \(row \d+ of the data\) ho"):
        trained(path)
    assert not Path("runs/quick/metrics.jsonl").exists()
    assert trained(path, "checks.first_batch=false", "steps=1").status == "done"


@pytest.mark.usefixtures("here")
def test_it_looks_once_and_at_no_later_batch():
    reads = []

    class Counted:
        size, ragged = ROWS, False

        def __getitem__(self, step, /):
            reads.append(step)
            every = {"row": np.arange(ROWS, dtype=np.int32), "mask": np.ones(ROWS, bool)}
            return batch(CLASSES if step == 3 else None) | every

        def shard(self, index, count):
            return self

    rows = Counted()
    params = {"w": np.zeros((3, CLASSES), np.float32)}
    call = {"steps": 6, "quiet": True, "parallel": "single"}
    jt.fit(COUNTED["optax"], params, rows, **call)
    looked = len(reads)
    reads.clear()
    jt.fit(COUNTED["optax"], params, rows, **call, check_batch=False)
    assert looked == len(reads), "it looks at the batch that the loss was traced with"


# Rows that are broadcast

PAIR = {"w": jnp.zeros((3, 1))}
Y = DRAW.normal(size=ROWS).astype(np.float32)


def column(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) + 0.5  # b 1


BROADCAST: dict[str, tuple[Callable, str]] = {
    "a scalar": (lambda p, b, rng: jnp.square(column(p, b) - b["y"]).mean(), "sub"),
    "where": (lambda p, b, rng: jnp.where(b["y"] > 0, column(p, b), 0).mean(), "select_n"),
    "in a jit": (jax.jit(lambda p, b, rng: abs(column(p, b) - b["y"]).mean()), "sub"),
    "a weight": (
        lambda p, b, rng: jt.Mean((column(p, b) * b["y"]).sum(), jnp.float32(ROWS)),
        "mul",
    ),
    "a maximum": (lambda p, b, rng: jnp.maximum(column(p, b), b["y"]).mean(), "max"),
    "of a fixed size": (
        lambda p, b, rng: jnp.square(column(p, b).reshape(ROWS, 1) - b["y"]).mean(),
        "sub",
    ),
}
MEANT: dict[str, Callable] = {
    "pairs of targets": lambda p, b, rng: (
        jnp.square(b["y"][:, None] - b["y"]).mean() + column(p, b).mean()
    ),
    "pairs of outputs": lambda p, b, rng: jnp.square(
        column(p, b)[:, 0][:, None] - column(p, b)[:, 0]
    ).mean(),
    "one row": lambda p, b, rng: jnp.square(column(p, b) - b["y"][None]).mean(),
    "transposed": lambda p, b, rng: jnp.square(column(p, b) - column(p, b).T).mean(),
    "one shape": lambda p, b, rng: jnp.square(column(p, b) - b["y"][:, None]).mean(),
    "another": lambda p, b, rng: jnp.square(column(p, b)[:, 0] - b["y"]).mean(),
    "a row for each": lambda p, b, rng: jax.vmap(lambda x, y: jnp.square(x @ p["w"] - y).sum())(
        b["x"], b["y"]
    ).mean(),
    "a bias of as many": lambda p, b, rng: (column(p, b) * jnp.arange(5.0)[None]).mean(),
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


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
@pytest.mark.usefixtures("as_people_run_it")
def test_fit_refuses_it_and_its_advice_works():
    call = {"steps": 2, "batch": 8, "quiet": True}
    params = {"w": np.zeros((3, 1), np.float32)}
    with pytest.raises(LossError, match=r"shapes \(8, 1\) and \(8,\)"):
        jt.fit(BROADCAST["a scalar"][0], params, (X, Y), **call)
    for name in ("one shape", "another"):
        loss = MEANT[name]
        assert jt.fit(loss, params, {"x": X, "y": Y}, **call).step == 2


SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "a mean of pairs": (
        lambda: jt.Mean.of(jnp.zeros((8, 8)), jnp.ones(8, bool)),
        r"values of shape \(8, 8\) and a mask of shape \(8,\)",
    ),
    "a mean of a column": (
        lambda: jt.Mean.of(jnp.zeros((8, 1)), jnp.ones(8, bool)),
        r"a value a row is `values\[:, 0\]`",
    ),
    "weights of pairs": (
        lambda: jt.Mean.of(jnp.zeros(8), jnp.ones(8, bool), jnp.ones((8, 1))),
        r"and weights of shape \(8, 1\)",
    ),
    "squared_error": (
        lambda: squared_error(jnp.zeros((8, 1)), jnp.zeros(8), jnp.ones(8, bool)),
        r"shapes \(8, 1\) and \(8,\)\. Give both one shape: outputs\[\.\.\., 0\]",
    ),
    "labels in a column": (
        lambda: cross_entropy(jnp.zeros((8, 3)), jnp.zeros((8, 1), int), jnp.ones(8, bool)),
        r"labels have the shape \(8, 1\)\. Give labels\[\.\.\., 0\]",
    ),
    "labels that are chances": (
        lambda: cross_entropy(jnp.zeros((8, 3)), jnp.zeros((8, 3), int), jnp.ones(8, bool)),
        "chances, one a class, are for soft_cross_entropy",
    ),
    "a mask of a column": (
        lambda: cross_entropy(jnp.zeros((8, 3)), jnp.zeros(8, int), jnp.ones((8, 1), bool)),
        r"the mask has the shape \(8, 1\), and the masked values \(8,\)",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("as_people_run_it")
def test_losses_and_means_refuse_shapes_that_do_not_belong_together(name):
    make, words = SHAPES[name]
    with pytest.raises(LossError, match=words):
        make()


@pytest.mark.usefixtures("as_people_run_it")
@pytest.mark.parametrize("shape", [(8, 1), (1, 3), (1, 1), (3,)])
def test_a_mean_refuses_a_mask_that_would_count_fewer_values_and_its_advice_works(shape):
    values, mask = jnp.ones((8, 3)), jnp.arange(8) < 6
    with pytest.raises(LossError, match=r"jnp\.broadcast_to\(mask\[:, None\], values\.shape\)"):
        jt.Mean.of(values, jnp.ones(shape, bool))
    mean = jt.Mean.of(values, jnp.broadcast_to(mask[:, None], values.shape))
    assert (float(mean.total), float(mean.weight)) == (18, 18)
