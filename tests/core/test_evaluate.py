"""Evaluation counts every row once, whatever the batches, or all together where they meet."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import strategy
from line import height, line, points, squared, start

import jtrain as jt
from jtrain.core.evaluate import evaluate, make_evaluate, rows_are_coupled
from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.step import make_step
from jtrain.data import Arrays, InOrder
from jtrain.errors import LossError
from jtrain.losses.contrastive import contrastive
from jtrain.parallel import FSDP, Mirrored, Strategy

ROWS = 37  # no number of devices divides it
PLACES = [("single", 1), ("mirrored jit", 2), ("mirrored shard_map", 8), ("fsdp", 8)]
COLUMNS = {name: points(ROWS)[name] for name in ("x", "y")}


def measured(where: Strategy, loss, batches, extra=(), **options) -> dict[str, float]:
    weights = jax.device_put((line(), extra), where.shardings((line(), extra)))
    placed = [where.place(batches[i]) for i in range(len(batches))]
    program = make_evaluate(loss, psum=where.psum, ragged=batches.ragged, **options)
    return evaluate(where.compile(program, weights, placed[0]), weights, placed)


def in_float64() -> tuple[np.ndarray, np.ndarray]:
    """Predictions and squared errors of all rows."""
    x, y = (COLUMNS[name].astype(np.float64) for name in ("x", "y"))
    predicted = x @ [0.5, -1.0, 2.0] + 0.25
    return predicted, np.square(predicted - y)


@pytest.mark.parametrize(("place", "size"), [*zip(PLACES, (8, 16, 16, 40), strict=True)], ids=str)
def test_counts_every_row_of_a_ragged_set_once(place, size):
    def loss(params, batch, rng):
        assert rng is None, "nothing may be drawn"
        predicted = height(params, batch)
        spread = Mean.of(jnp.abs(predicted), batch["mask"] & (batch["x"][:, 0] > 0))
        metrics = {"mean": Mean.of(predicted, batch["mask"])}
        return squared(params, batch, rng) + 0.5 * spread, metrics

    got = measured(strategy(*place), loss, InOrder(Arrays(**COLUMNS), size=size))
    predicted, error = in_float64()
    some = COLUMNS["x"][:, 0] > 0
    assert_close(got.pop("mean"), predicted.mean(), 1e-6, terms=predicted)
    want = {"loss": error.mean() + 0.5 * np.abs(predicted[some]).mean(), "rows": ROWS}
    assert got == pytest.approx(want, rel=1e-6)


def test_what_the_mask_hides_may_be_nan():
    class Spoilt(InOrder):
        def __getitem__(self, step):
            batch = super().__getitem__(step)
            hidden = ~batch["mask"]
            return batch | {"y": np.where(hidden, np.float32(np.nan), batch["y"])}

    where = strategy("mirrored jit", 4)
    got = measured(where, squared, Spoilt(Arrays(**COLUMNS), size=16))
    assert got == pytest.approx({"loss": in_float64()[1].mean(), "rows": ROWS}, rel=1e-6)


def test_a_term_that_no_row_carries_adds_nothing():
    def loss(params, batch, rng):
        never = Mean.of(height(params, batch), jnp.zeros_like(batch["mask"]))
        return squared(params, batch, rng) + 2.0 * never, {"never": never}

    got = measured(strategy("single", 1), loss, InOrder(Arrays(**COLUMNS), size=16))
    assert got["loss"] == pytest.approx(in_float64()[1].mean(), rel=1e-6)
    assert np.isnan(got["never"])


def test_a_set_without_any_target_has_no_loss():
    def loss(params, batch, rng):
        nothing = jnp.zeros_like(batch["mask"])
        never = Mean.of(height(params, batch), nothing)
        return never + 2.0 * Mean.of(batch["y"], nothing), {"never": never}

    got = measured(strategy("single", 1), loss, InOrder(Arrays(**COLUMNS), size=16))
    assert np.isnan([got["loss"], got["never"]]).all(), "0.0 would be the best loss of all"
    assert got["rows"] == ROWS


def test_state_is_read_and_not_changed():
    @stateful
    def loss(params, extra, batch, rng):
        shifted = Mean.of(height(params, batch) + extra["shift"], batch["mask"])
        return squared(params, batch, rng), {"shifted": shifted}, extra

    extra = {"shift": jnp.float32(3)}
    got = measured(strategy("single", 1), loss, InOrder(Arrays(**COLUMNS), size=16), extra)
    assert_close(got["shifted"], in_float64()[0].mean() + 3, 1e-6, terms=in_float64()[0])


def test_a_plain_scalar_is_refused_on_a_ragged_set_and_right_on_a_full_one():
    scalar = lambda params, batch, rng: jnp.square(height(params, batch) - batch["y"]).mean()
    where = strategy("mirrored jit", 4)
    with pytest.raises(LossError, match="Return a Mean instead"):
        measured(where, scalar, InOrder(Arrays(**COLUMNS), size=16))
    full = {name: column[:32] for name, column in COLUMNS.items()}
    got = measured(where, scalar, InOrder(Arrays(**full), size=16))
    assert got["loss"] == pytest.approx(in_float64()[1][:32].mean(), rel=1e-6)


def four_and_two() -> dict[str, np.ndarray]:
    """Six rows as two devices get them: four, and two that padding fills up."""
    return points(8, hidden=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mirrored jit", "mirrored shard_map"])
def test_four_rows_and_two_weigh_a_sixth_each_in_training(name):
    where, batch, optimizer = strategy(name, 2), four_and_two(), optax.sgd(1.0)
    state = start(optimizer, where)
    step = make_step(squared, optimizer, psum=where.psum, ragged=True)
    state, metrics = where.compile(step, state, where.place(batch), returns_state=True)(
        state, where.place(batch)
    )
    x, y = (batch[name].astype(np.float64) for name in ("x", "y"))
    error = x @ [0.5, -1.0, 2.0] + 0.25 - y
    by_row = 2 * error[:, None] * x  # the gradient of each row
    sixth = by_row[:6].sum(0) / 6
    got = np.array([0.5, -1.0, 2.0]) - np.asarray(state.params["slope"])
    assert distance(got, sixth) < 1e-6
    assert metrics["loss"].value() == pytest.approx(np.square(error[:6]).mean(), rel=1e-6)
    replicas_first = by_row[:4].sum(0) / 8 + by_row[4:6].sum(0) / 4
    assert np.abs(replicas_first / sixth - 1).max() > 0.1, "the example tells the two apart"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


DRAW = np.random.default_rng(0)
PAIRS = 64
DATA = {name: DRAW.normal(size=(PAIRS, 6)).astype(np.float32) for name in ("left", "right")}
PARAMS = {name: DRAW.normal(size=(6, 8)).astype(np.float32) for name in ("left", "right")}


def towers(params, batch, rng):
    del rng
    left, right = (batch[name] @ params[name] for name in ("left", "right"))
    return contrastive(left, right, jnp.float32(1), batch["mask"])


def all_in_float64() -> float:
    """The loss over all rows."""
    left, right = (DATA[n].astype(np.float64) @ PARAMS[n] for n in ("left", "right"))
    left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
    like = np.e * left @ right.T
    log_total = lambda axis: np.log(np.exp(like).sum(axis)) - np.diag(like)
    return float((log_total(1) + log_total(0)).mean() / 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"batch": PAIRS, "parallel": FSDP(devices=4)},
        {"batch": 72, "parallel": Mirrored(devices=8)},
    ],
    ids=str,
)
def test_all_rows_meet_in_one_batch(how):
    got = jt.evaluate(towers, PARAMS, DATA, rows_interact="batch", **how)
    assert got["loss"] == pytest.approx(all_in_float64(), rel=1e-5)
    assert got["rows"] == PAIRS


@pytest.mark.thorough
def test_what_would_cut_them_is_refused_and_its_advice_works():
    size = 16
    with pytest.raises(LossError, match=rf"batches of {size} would cut the data into") as caught:
        jt.evaluate(towers, PARAMS, DATA, batch=size, rows_interact="batch")
    assert "(batch=64, or data in a single batch)" in str(caught.value)
    apart = jt.evaluate(towers, PARAMS, DATA, batch=size, rows_interact="slice")["loss"]
    parts = [{n: x[i : i + size] for n, x in DATA.items()} for i in range(0, PAIRS, size)]
    alone = [jt.evaluate(towers, PARAMS, part, rows_interact="batch")["loss"] for part in parts]
    assert apart == pytest.approx(np.mean(alone), rel=1e-5), "each batch is a group of its own"
    own = InOrder(Arrays(**DATA), size=PAIRS)
    assert jt.evaluate(towers, PARAMS, own, rows_interact="batch")["loss"] > apart + 0.5
    with pytest.raises(LossError, match="would cut the data"):
        jt.evaluate(towers, PARAMS, InOrder(Arrays(**DATA), size=size), rows_interact="batch")


@pytest.mark.thorough
def test_copies_are_refused_as_in_training():
    where = Mirrored(impl="shard_map", devices=2)
    with pytest.raises(LossError, match="separate copies of the step would cut the batch"):
        jt.evaluate(towers, PARAMS, DATA, rows_interact="batch", parallel=where)
    with pytest.raises(LossError, match="separate copies of the step would cut the batch"):
        make_evaluate(towers, rows_interact="batch", psum=where.build().psum)
    assert make_evaluate(towers, rows_interact="slice", psum=where.build().psum)
    assert jt.evaluate(towers, PARAMS, DATA, rows_interact="slice", parallel=where)["rows"] == PAIRS


def fitted(loss=towers, params=PARAMS, **more):
    call: dict[str, Any] = {"steps": 2, "batch": 32, "rows_interact": "batch", "quiet": True}
    return jt.fit(loss, params, DATA, "sgd", lr=0.1, valid=DATA, **(call | more))


@pytest.mark.thorough
def test_a_run_is_refused_before_it_trains_and_its_advice_works():
    with pytest.raises(LossError, match=r"batches of 32 would cut the 64 rows of `valid` into 2"):
        fitted()
    whole = fitted(valid_batch=64)
    together = jt.evaluate(towers, whole.params, DATA, rows_interact="batch")["loss"]
    assert whole.history["valid/loss"][2] == pytest.approx(together, rel=1e-6)
    assert whole.evaluate(DATA)["loss"] == pytest.approx(together, rel=1e-6)
    with pytest.raises(LossError, match="batches of 16 would cut the data into 4"):
        whole.evaluate(DATA, batch=16)
    groups = fitted(valid_rows_interact="slice")
    apart = jt.evaluate(towers, groups.params, DATA, rows_interact="slice", batch=32)["loss"]
    assert groups.history["valid/loss"][2] == pytest.approx(apart, rel=1e-6)


@pytest.mark.thorough
def test_rows_that_meet_in_training_alone_may_be_in_several_batches():
    @jt.stateful
    def normed(params, extra, batch, rng):
        x = batch["left"]
        mean = extra["mean"] if rng is None else x.mean(0)
        error = (x - mean[None]) @ params["left"][:, 0] - batch["right"][:, 0]
        kept = extra if rng is None else {"mean": jt.Mean(x.sum(0), jnp.float32(len(x)))}
        return jt.Mean.of(jnp.square(error), batch["mask"]), {}, kept

    extra = {"mean": np.zeros(6, np.float32)}
    assert fitted(normed, {"left": PARAMS["left"]}, extra=extra).step == 2


def test_whether_rows_meet_is_seen_from_one_batch():
    batch = {**DATA, "row": np.arange(PAIRS, dtype=np.int32), "mask": np.ones(PAIRS, bool)}
    apart = lambda params, batch, rng: jt.Mean.of(batch["left"][:, 0], batch["mask"])
    scalar = lambda params, batch, rng: jnp.square(batch["left"]).mean()
    centred = lambda params, batch, rng: jt.Mean.of(
        jnp.square(batch["left"] - batch["left"].mean(0, keepdims=True)).sum(-1), batch["mask"]
    )
    found = {}
    for name, loss in {
        "towers": towers,
        "apart": apart,
        "scalar": scalar,
        "centred": centred,
    }.items():
        program = jax.jit(make_evaluate(loss))
        found[name] = rows_are_coupled(lambda batch, p=program: p((PARAMS, ()), batch), batch)
        odd = {name: array[:63] for name, array in batch.items()}
        assert rows_are_coupled(lambda batch, p=program: p((PARAMS, ()), batch), odd) == found[name]
    assert found == {"towers": True, "apart": False, "scalar": False, "centred": True}
