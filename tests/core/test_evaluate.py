"""Evaluation counts every row once, whatever the batches, and gives numpy's float64 mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from layouts import strategy
from line import height, line, points, squared, start

from jtrain.core.evaluate import evaluate, make_evaluate
from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.step import make_step
from jtrain.data.batches.by_step import InOrder
from jtrain.data.sources.arrays import Arrays
from jtrain.errors import LossError
from jtrain.parallel import Strategy

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


@pytest.mark.parametrize(
    ("place", "size"), list(zip(PLACES, (8, 16, 16, 40), strict=True)), ids=str
)
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


def test_no_batches_give_no_numbers():
    assert evaluate(make_evaluate(squared), (line(), ()), []) == {}


def test_a_batch_without_row_and_mask_is_full():
    got = evaluate(jax.jit(make_evaluate(squared)), (line(), ()), [COLUMNS])
    assert got == pytest.approx({"loss": in_float64()[1].mean(), "rows": ROWS}, rel=1e-6)


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
